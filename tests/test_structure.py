"""The shape of the package: which way imports point, where foreign libraries live, how big things may grow."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).parent.parent / "pdactors"
ORDER = (
    "errors version config token_ids stamps messages client_messages openai_messages transport kernels kv policy "
    "engine text observe actors launchers client bench sim cli"
).split()
HOMES = {  # foreign library -> the only modules and packages that may import it
    "tokenizers": ("text/",),
    "jinja2": ("text/",),
    "zmq": ("transport/zmq.py",),
    "ucxx": ("transport/ucx.py",),
    "cupy": ("transport/cuda_ipc.py",),
    "ray": ("launchers/ray.py",),
    "mooncake": ("transport/mooncake.py",),
    "numba": ("kernels/",),
    "torch": ("engine/", "bench/"),
    "transformers": ("engine/", "bench/"),
    "safetensors": ("engine/", "bench/"),
    "gguf": ("engine/", "bench/"),
    "huggingface_hub": ("engine/", "bench/"),
    "click": ("cli/",),
    "structlog": ("config/",),
    "aiohttp": ("bench/openai_target.py",),
    "matplotlib": ("bench/report.py", "sim/plan_report.py"),
    "starlette": ("actors/http/",),
    "uvicorn": ("actors/http/",),
    "prometheus_client": ("observe/",),
    "rich": ("cli/", "bench/", "engine/store.py"),
}
PURE = {"policy", "kv"}
IMPURE = {"torch", "zmq", "time", "datetime", "asyncio", "socket", "threading", "subprocess", "random", "secrets"}
UNSAFE_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"}
UNSAFE_NAMES = {"eval", "exec", "__import__"}
UNSAFE_ATTRIBUTES = {"recv_pyobj", "send_pyobj"}
VAGUE = {"utils", "util", "helpers", "helper", "common", "misc", "tools"}
MAX_FILE_LINES, MAX_FUNCTION_LINES = 400, 70
LONG_FILES = {"messages.py": 760}  # one vocabulary, read as a list


@dataclass(frozen=True)
class Import:
    module: str  # absolute
    line: int

    @property
    def top(self) -> str:
        return self.module.split(".")[0]


@dataclass(frozen=True)
class Module:
    path: PurePosixPath  # below pdactors/
    text: str

    @property
    def package(self) -> str:
        """The entry of ORDER that this module belongs to; "" for pdactors itself."""
        return "" if str(self.path) == "__init__.py" else self.path.with_suffix("").parts[0]

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def imports(self) -> list[Import]:
        """Every import, wherever it stands: in a function and under TYPE_CHECKING too."""
        found = []
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                found += [Import(alias.name, node.lineno) for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{self.path}:{node.lineno}: a relative import"
                if node.module in ("pdactors", "pdactors.transport"):  # the name may be a module
                    found += [Import(f"{node.module}.{alias.name}", node.lineno) for alias in node.names]
                else:
                    found.append(Import(node.module or "", node.lineno))
        return found


def modules() -> list[Module]:
    return [
        Module(PurePosixPath(path.relative_to(ROOT).as_posix()), path.read_text("utf-8"))
        for path in sorted(ROOT.rglob("*.py"))
    ]


MODULES = modules()
every_module = pytest.mark.parametrize("module", MODULES, ids=[str(module.path) for module in MODULES])


def wrong_way(module: Module) -> Iterator[str]:
    """Yield imports of our own that do not point up in ORDER."""
    for found in module.imports:
        if found.top != "pdactors" or not module.package:
            continue
        target = found.module.split(".")[1]
        if target != module.package and ORDER.index(target) > ORDER.index(module.package):
            yield f"{module.path}:{found.line} imports {found.module}"


def away_from_home(module: Module) -> Iterator[str]:
    for found in module.imports:
        homes = HOMES.get(found.top)
        if homes and not any(str(module.path).startswith(home) for home in homes):
            yield f"{module.path}:{found.line} imports {found.module}, whose home is {' or '.join(homes)}"


def unsafe(module: Module) -> Iterator[str]:
    """Yield whatever can run code that came in as data."""
    for found in module.imports:
        if found.top in UNSAFE_MODULES:
            yield f"{module.path}:{found.line} imports {found.module}"
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Name) and node.id in UNSAFE_NAMES:
            yield f"{module.path}:{node.lineno} uses {node.id}"
        elif isinstance(node, ast.Attribute):
            is_load = node.attr == "load" and isinstance(node.value, ast.Name) and node.value.id == "torch"
            if node.attr in UNSAFE_ATTRIBUTES or is_load:
                yield f"{module.path}:{node.lineno} uses {node.attr}"


def test_every_package_has_its_place_in_the_order():
    assert {module.package for module in MODULES} - {""} <= set(ORDER)


@every_module
def test_imports_point_up(module):
    assert not list(wrong_way(module))


@every_module
def test_a_foreign_library_stays_at_home(module):
    assert not list(away_from_home(module))


@every_module
def test_decisions_and_bookkeeping_are_pure(module):
    if module.package in PURE:
        assert not {found.top for found in module.imports} & IMPURE


@every_module
def test_nothing_runs_what_it_receives(module):
    assert not list(unsafe(module))


@every_module
def test_a_module_says_what_it_owns(module):
    assert ast.get_docstring(module.tree)


@every_module
def test_a_module_is_named_after_something(module):
    assert not VAGUE & set(module.path.with_suffix("").parts)


@every_module
def test_a_file_fits_in_a_head_and_a_function_on_a_screen(module):
    assert len(module.text.splitlines()) <= LONG_FILES.get(str(module.path), MAX_FILE_LINES)
    for node in ast.walk(module.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length <= MAX_FUNCTION_LINES, f"{module.path}:{node.lineno} {node.name} has {length} lines"


def test_an_exception_that_nobody_needs_is_struck_off():
    needed = {str(module.path) for module in MODULES if len(module.text.splitlines()) > MAX_FILE_LINES}
    assert needed == set(LONG_FILES)


@pytest.mark.parametrize(
    ("path", "text", "rule"),
    [
        ("policy/x.py", "from pdactors.actors import router", wrong_way),
        ("policy/x.py", "from pdactors import engine", wrong_way),
        ("kv/x.py", "def f():\n    import pdactors.cli.main", wrong_way),
        ("kv/x.py", "if TYPE_CHECKING:\n    from pdactors.engine.model import PagedModel", wrong_way),
        ("actors/x.py", "import torch.nn", away_from_home),
        ("transport/x.py", "from zmq import asyncio", away_from_home),
        ("engine/model.py", "from rich.console import Console", away_from_home),
        ("engine/x.py", "import pickle", unsafe),
        ("engine/x.py", "torch.load(path)", unsafe),
        ("actors/x.py", "socket.recv_pyobj()", unsafe),
        ("config/x.py", "value = eval(text)", unsafe),
    ],
)
def test_the_rules_find_what_they_forbid(path, text, rule):
    assert list(rule(Module(PurePosixPath(path), text)))


def test_the_rules_let_pass_what_is_allowed():
    fine = "from pdactors.policy.batching import plan_step\nimport torch\nmodel.eval()\ntomllib.load(f)"
    module = Module(PurePosixPath("engine/x.py"), fine)
    assert not [*wrong_way(module), *away_from_home(module), *unsafe(module)]

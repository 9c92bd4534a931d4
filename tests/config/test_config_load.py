from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdactors.config import ClusterConfig, KVSection, ListenSection, ModelSection, NodeSection, SecuritySection
from pdactors.config.fields import SECTIONS
from pdactors.config.load import load, show
from pdactors.errors import ConfigError

SECRET = "open-sesame"

DOCUMENTED = """
[cluster]
mode = "disaggregated"
[model]
path = "smollm2-135m"
dtype = "bfloat16"
max_model_len = 4096
[listen]
tcp  = "127.0.0.1:7070"
zmq  = "tcp://127.0.0.1:7071"
http = "127.0.0.1:7080"
[engine]
max_batch = 32
chunk_tokens = 512
batch_wait_ms = 0
slow_step_ms = 100
[kv]
block_tokens = 32
memory = "2GiB"
transport = "auto"
compression = "none"
prune = 1.0
lease_s = 30
checksum = true
store = "arena"
[router]
node = "n0"
control = "tcp://127.0.0.1:0"
policy = "locality"
max_distance = 2
local_prefill_tokens = 0
max_queue = 1024
request_timeout_s = 600
heartbeat_ms = 500
dead_after_ms = 2000
[trace]
requests = 256
steps = 16384
[security]
token = ""
join_token = ""
curve = false
[[node]]
name = "n0"
host = "127.0.0.1"
rack = "r0"
prefill = 1
decode = 1
device = "cpu"
threads = 1
ucx_device = ""
ucx_ports = "30000-30010"
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "cluster.toml"


def error_of(file: Path | None, text: str = "", *sets: str, **environ: str) -> str:
    if file is not None:
        file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load(file, sets=sets, environ=environ)
    return str(caught.value)


def test_the_documented_file_is_the_default(file: Path) -> None:
    file.write_text(DOCUMENTED)
    assert load(file, environ={}) == load(None, environ={}) == ClusterConfig()


def test_the_documented_file_names_every_key_but_the_optional_ones() -> None:
    tables = tomllib.loads(DOCUMENTED)
    tables["node"] = tables["node"][0]
    left_out = {f"{name}.{key}" for name, fields in SECTIONS.items() for key in fields.keys() - tables[name].keys()}
    assert left_out == {
        "cluster.drain_s",
        "cluster.launcher",
        "kv.damage_every",
        "kv.overlap",
        "router.record",
        "kv.store_memory",
        "engine.stamp_tokens",
        "security.token_file",
        "security.join_token_file",
        "security.key_dir",
        "node.workers",
    }


def test_set_overrides_the_environment_and_the_environment_overrides_the_file(file: Path) -> None:
    file.write_text("[kv]\nlease_s = 1\nprune = 0.1\nblock_tokens = 8\n")
    environ = {"PDACTORS_KV_PRUNE": "0.2", "PDACTORS_KV_BLOCK_TOKENS": "16"}
    cfg = load(file, sets=["kv.block_tokens=64"], environ=environ)
    assert (cfg.kv.lease_s, cfg.kv.prune, cfg.kv.block_tokens) == (1.0, 0.2, 64)


def test_other_variables_are_left_alone() -> None:
    environ = {"PDACTORS_HOME": "/x", "PDACTORS_LOG_LEVEL": "debug", "PATH": "/bin", "KV_PRUNE": "0.5"}
    assert load(None, environ=environ) == ClusterConfig()


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("model.path=a/b", "a/b"),
        ('model.path="a b"', "a b"),
        ("model.path='a'", "a"),
        ("model.path=true", "true"),
        ("model.path=12", "12"),
        ("model.path=a=b", "a=b"),
        ("model.path='half", "'half"),
        (" model.path = spaced ", "spaced"),
    ],
)
def test_a_string_is_taken_as_it_stands_unless_it_is_quoted(argument: str, expected: str) -> None:
    assert load(None, sets=[argument], environ={}).model.path == expected


def test_a_node_is_set_by_index_or_by_name(file: Path) -> None:
    file.write_text('[[node]]\n[[node]]\nname = "big"\n')
    sets = ["node.0.decode=2", "node.big.decode=3"]
    cfg = load(file, sets=sets, environ={"PDACTORS_NODE_1_UCX_PORTS": "5-6"})
    assert [(node.decode, node.ucx_ports) for node in cfg.node] == [(2, "30000-30010"), (3, "5-6")]


def test_the_default_node_can_be_set_without_a_file() -> None:
    assert load(None, sets=["node.n0.decode=2", "node.0.threads=0"], environ={}).node == (
        NodeSection(decode=2, threads=0),
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[kv]\nlease_s = 5\nblok_tokens = 8", ":3: kv.blok_tokens: unknown key; did you mean block_tokens?"),
        ("[kvv]\nlease_s = 5", ":1: kvv: unknown section; did you mean kv?"),
        ("[zzz]", ":1: zzz: unknown section; known: cluster, model"),
        ("\nmode = 'chunked'", ":2: mode: unknown section; this is a key of [cluster]"),
        ("[engine]\nheartbeat_ms = 5", ":2: engine.heartbeat_ms: unknown key in [engine]; it belongs to [router]"),
        ("[kv]\nblock_tokens = '8'", ':2: kv.block_tokens = "8": expected a whole number from 8 to 256'),
        ("[kv]\n\nprune = 0", ":3: kv.prune = 0: expected a number more than 0.0 and at most 1.0"),
        ("[kv]\nprune = nan", ":2: kv.prune = NaN: expected a number"),
        ("[kv]\nchecksum = 1", ":2: kv.checksum = 1: expected true or false"),
        ("[kv]\nmemory = -1", ":2: kv.memory = -1: expected a string or a whole number"),
        ("[kv]\nmemory = 2020-01-01", ":2: kv.memory = (date): expected"),
        ("[model]\npath = ''", ':2: model.path = "": expected a string of at least 1 character'),
        ("[cluster]\nmode = 'fast'", ':2: cluster.mode = "fast": expected one of "colocated", "chunked", "disagg'),
        ("kv = 3", ":1: kv: expected a table, [kv]"),
        ("[node]\nname = 'a'", ":1: node: expected at least one table, [[node]]"),
        ("node = []", ":1: node: expected at least one table, [[node]]"),
        ("[[node]]\n[[node]]\nx = 1\ndecode = -1", ":4: node.1.decode = -1: expected a whole number from 0 to 256"),
        ("[[kv]]\nlease_s = 5", ":1: kv: expected a table, [kv]"),
        ("[kv]\nlease_s = 5 6", ":2: Expected newline or end of document after a statement (column 13)"),
        ("[kv]\nlease_s = 5\nlease_s = 6\n\n", ":3: Cannot overwrite a value (column 12)"),
        ("[kv]\nlease_s = 5\nlease_s = 6", ":3: Cannot overwrite a value"),
        ("[kv]\nblock_tokens = 24", ":2: kv.block_tokens = 24: must be a power of two"),
        ("# a\n[router]\nheartbeat_ms = 5000", ":3: router.dead_after_ms = 2000: must be more than"),
        ("kv = { block_tokens = 24 }", ":1: kv.block_tokens = 24: must be a power of two"),
    ],
)
def test_a_mistake_in_the_file_names_file_line_key_value_and_what_was_expected(
    file: Path, text: str, expected: str
) -> None:
    assert f"{file}{expected}" in error_of(file, text)


def test_a_mistake_in_a_variable_names_the_variable() -> None:
    message = error_of(None, PDACTORS_KV_BLOK_TOKENS="8")
    assert message.startswith("environment variable PDACTORS_KV_BLOK_TOKENS: kv.blok_tokens: unknown key; did you mean")
    message = error_of(None, PDACTORS_ENGINE_MAX_BATCH="many")
    assert message == (
        'environment variable PDACTORS_ENGINE_MAX_BATCH: engine.max_batch = "many": '
        "expected a whole number from 1 to 4096"
    )
    assert "PDACTORS_FOO: foo: unknown section" in error_of(None, PDACTORS_FOO="1")
    assert "PDACTORS_KV: kv: names a section" in error_of(None, PDACTORS_KV="1")
    assert "PDACTORS_NODE_7_DECODE: node.7.decode: no such node" in error_of(None, PDACTORS_NODE_7_DECODE="1")
    assert "not valid UTF-8" in error_of(None, PDACTORS_MODEL_PATH="\udcff")


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("kv.compression=int9", '--set kv.compression=int9: kv.compression = "int9": expected one of "none", "int8"'),
        ("kv.compresion=int8", "--set kv.compresion=int8: kv.compresion: unknown key; did you mean compression?"),
        ("kv.checksum=True", '--set kv.checksum=True: kv.checksum = "True": expected true or false'),
        ("kv.checksum", "--set kv.checksum: write SECTION.KEY=VALUE"),
        ("kv=1", "--set kv=1: kv: names a section"),
        ("node.decode=1", "--set node.decode=1: node.decode: no such node; write node.INDEX.KEY or node.NAME.KEY"),
        ("node.1.decode=1", "no such node; write node.INDEX.KEY or node.NAME.KEY, known: n0"),
        ("kv.block_tokens=24", "--set kv.block_tokens=24: kv.block_tokens = 24: must be a power of two"),
        ("a.b.c=1", "--set a.b.c=1: a.b.c: unknown section"),
        ("=", "unknown section"),
    ],
)
def test_a_mistake_in_a_set_argument_names_the_argument(argument: str, expected: str) -> None:
    assert expected in error_of(None, "", argument)


def test_all_mistakes_of_a_file_are_listed(file: Path) -> None:
    message = error_of(file, "[kv]\nx = 1\nprune = 7\n[zz]\n")
    assert [line.split(": ")[0] for line in message.splitlines()] == [f"{file}:2", f"{file}:3", f"{file}:4"]


def test_a_mistake_is_placed_by_what_was_set_last(file: Path) -> None:
    assert error_of(file, "[kv]\nblock_tokens = 24", "kv.block_tokens=40").startswith("--set kv.block_tokens=40: ")


def test_unreadable_files_are_errors_that_name_them(file: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cluster\.toml: cannot be read: No such file"):
        load(file, environ={})
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        load(tmp_path, environ={})
    file.write_bytes(b"# ok\n\n# \xff\n")
    with pytest.raises(ConfigError, match=r"cluster\.toml:3: not valid UTF-8"):
        load(file, environ={})
    file.write_bytes(b"#" * (2**20 + 1))
    with pytest.raises(ConfigError, match="more than a cluster file may have"):
        load(file, environ={})
    file.write_text("a = " + "[" * 50_000)
    with pytest.raises(ConfigError, match="recursion"):
        load(file, environ={})


@pytest.mark.parametrize(
    "argument", [f"security.token={SECRET} x", f"security.join_token:{SECRET}", f"security.token=[{SECRET}\x01"]
)
def test_no_error_about_a_set_argument_shows_a_secret(argument: str) -> None:
    assert SECRET not in error_of(None, "", argument)


def test_no_error_about_a_file_shows_a_secret(file: Path) -> None:
    assert SECRET not in error_of(file, f'[security]\ntoken = ["{SECRET}"]')
    assert SECRET not in error_of(file, f'[security]\njoin_token = "{SECRET} x"')


def test_show_hides_secrets_unless_asked() -> None:
    cfg = load(None, sets=[f"security.token={SECRET}", f"security.join_token={SECRET}"], environ={})
    assert SECRET not in show(cfg)
    assert show(cfg).count('"***"') == 2
    assert show(cfg, secrets=True).count(SECRET) == 2


def test_the_shown_text_with_hidden_secrets_cannot_be_loaded_by_mistake(file: Path) -> None:
    message = error_of(file, show(ClusterConfig(security=SecuritySection(token=SECRET))))
    assert 'security.token = "***": stands for a secret' in message


def test_show_explains_every_key_and_says_what_differs_from_the_default() -> None:
    lines = show(ClusterConfig(kv=KVSection(memory="1GiB"))).splitlines()
    assert (
        'memory = "1GiB"  # per node and device: "2GiB", "512MiB", "1.5GB", or a number of bytes; default "2GiB"'
        in (lines)
    )
    assert "overlap = true  # send the KV of finished prompt chunks while later ones are computed" in lines
    assert all("  # " in line for line in lines if "=" in line.split("#")[0])


words = st.text(st.characters(codec="utf-8", exclude_characters="\r"), min_size=1, max_size=12)
names = st.from_regex(r"[a-z][a-z0-9_-]{0,6}", fullmatch=True)


@st.composite
def configs(draw: st.DrawFn) -> ClusterConfig:
    nodes = draw(st.lists(st.builds(NodeSection, name=names, rack=st.just("r1"), ucx_device=words), min_size=1))
    unique = tuple({node.name: node for node in nodes}.values())
    return ClusterConfig(
        model=draw(st.builds(ModelSection, path=words, dtype=st.sampled_from(["float32", "float16"]))),
        listen=draw(st.builds(ListenSection, tcp=st.sampled_from(["", "[::1]:0", "tcp://localhost:99"]))),
        kv=draw(
            st.builds(
                KVSection,
                memory=st.sampled_from(["1.5GB", 2**21]),
                prune=st.floats(0, 1, exclude_min=True),
                lease_s=st.floats(0.1, 86_400.0),
                checksum=st.booleans(),
            )
        ),
        security=draw(st.builds(SecuritySection, key_dir=words)),
        node=(NodeSection(), *(node for node in unique if node.name != "n0")),
    )


@given(cfg=configs())
def test_loading_what_was_shown_gives_the_same_configuration(
    cfg: ClusterConfig, tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = tmp_path_factory.getbasetemp() / "shown.toml"
    file.write_text(show(cfg), encoding="utf-8", newline="")
    assert load(file, environ={}) == cfg


toml_like = st.lists(
    st.sampled_from(
        ["[kv]\n", "[[node]]\n", "prune", " = ", "3", '"""', "'", "\n", "{", "}", "[", "]", ".", "#", "nan"]
    ),
    max_size=20,
).map("".join)


@given(text=st.one_of(st.text(st.characters(codec="utf-8")), toml_like))
def test_any_text_is_loaded_or_refused_with_the_name_of_the_file(
    text: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = tmp_path_factory.getbasetemp() / "any.toml"
    file.write_text(text, encoding="utf-8", newline="")
    refused = refusal(file)
    assert refused is None or refused.startswith(str(file))


@given(key=st.sampled_from(sorted(f"{name}.{key}" for name in SECTIONS for key in SECTIONS[name])), value=st.text())
def test_any_set_argument_is_taken_or_refused_with_the_name_of_its_key(key: str, value: str) -> None:
    key = key.replace("node.", "node.0.") if key.startswith("node.") else key
    refused = refusal(None, f"{key}={value}")
    assert refused is None or f"--set {key}=" in refused


def refusal(file: Path | None, *sets: str) -> str | None:
    try:
        load(file, sets=sets, environ={})
    except ConfigError as error:
        return str(error)
    return None

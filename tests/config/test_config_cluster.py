from __future__ import annotations

from io import StringIO
from pathlib import Path

import msgspec
import pytest
import rich.console

from pdactors.config import ClusterConfig, KVSection, NodeSection, RouterSection, SecuritySection, validate
from pdactors.config.fields import SECTIONS
from pdactors.errors import ConfigError


def test_the_default_is_a_valid_cluster_of_one_prefill_and_one_decode_actor() -> None:
    cfg = ClusterConfig()
    validate(cfg)
    assert cfg.is_separated
    assert [node.engines(cfg.cluster.mode) for node in cfg.node] == [{"prefill": 1, "decode": 1}]


@pytest.mark.parametrize(("text", "expected"), [("2GiB", 2 * 2**30), ("1.5GB", 1_500_000_000), (4096, 4096)])
def test_memory_is_read_as_bytes(text: str | int, expected: int) -> None:
    assert KVSection(memory=text).memory_bytes == expected


def test_memory_that_is_no_size_names_the_key_and_the_text() -> None:
    with pytest.raises(ConfigError, match=r'kv\.memory: "lots" is not a size'):
        _ = KVSection(memory="lots").memory_bytes


def test_a_node_without_workers_gets_as_many_as_its_prefill_and_decode_actors() -> None:
    assert NodeSection(prefill=2, decode=3).num_workers == 5
    assert NodeSection(prefill=2, decode=3, workers=1).engines("chunked") == {"worker": 1}
    assert NodeSection(prefill=2, decode=0).engines("kvstore") == {"prefill": 2}
    assert NodeSection(prefill=0, decode=0).engines("colocated") == {}


def test_ucx_ports_are_a_range_that_holds_both_ends() -> None:
    assert list(NodeSection(ucx_ports="5-7").ucx_port_range) == [5, 6, 7]


@pytest.mark.parametrize("text", ["7-5", "0-5", "5", "5-70000", "a-b", "", "5-7-9"])
def test_ucx_ports_that_are_no_range_are_refused_with_the_text(text: str) -> None:
    with pytest.raises(ConfigError, match=f'"{text}" is not a range'):
        _ = NodeSection(ucx_ports=text).ucx_port_range


def test_a_node_is_found_by_name_and_a_missing_one_lists_the_known() -> None:
    cfg = ClusterConfig(node=(NodeSection(name="a"), NodeSection(name="b", decode=4)))
    assert cfg.node_named("b").decode == 4
    with pytest.raises(ConfigError, match="known: a, b"):
        cfg.node_named("c")


def test_secrets_are_in_no_representation_of_the_configuration() -> None:
    cfg = ClusterConfig(security=SecuritySection(token="open-sesame", join_token="hunter2"))
    output = StringIO()
    rich.console.Console(file=output, width=500).print(cfg)
    for text in (repr(cfg), str(cfg), f"{cfg.security}", output.getvalue()):
        assert "***" in text
        assert "sesame" not in text
        assert "hunter2" not in text


def test_a_configuration_survives_the_wire() -> None:
    cfg = ClusterConfig(kv=KVSection(memory=2**30), security=SecuritySection(token="t"), node=(NodeSection(name="x"),))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(cfg), type=ClusterConfig) == cfg


def test_every_key_has_a_line_of_documentation_and_every_number_a_range() -> None:
    for fields in SECTIONS.values():
        for field in fields.values():
            assert field.doc
            assert "\n" not in field.doc
            assert field.fault(field.default) is None
            if type(field.default) in (int, float):
                assert " from " in field.expected or " more than " in field.expected
                assert field.fault(-1)
                assert field.fault(2**80)
                assert field.fault(float("nan"))


def test_a_token_file_holds_the_token_and_white_space_around_it_is_ignored(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("open-sesame\n")
    assert SecuritySection(token_file=str(file)).client_token() == "open-sesame"
    assert SecuritySection(token="inline").client_token() == "inline"
    assert SecuritySection().client_token() == ""


@pytest.mark.parametrize("content", [None, "", "two words", "\x00"])
def test_a_token_file_without_one_token_is_an_error_that_names_it(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "token"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match=f'security.token_file = "{file}"'):
        SecuritySection(token_file=str(file)).client_token()


def test_sections_are_frozen() -> None:
    with pytest.raises(AttributeError):
        RouterSection().max_queue = 3  # type: ignore[misc]

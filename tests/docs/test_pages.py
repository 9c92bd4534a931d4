"""README, docs and examples say what is so: files load, commands and options exist, links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args
from unittest.mock import patch

import click
import msgspec
import pytest
from pages import PAGES, ROOT, Block, Command, blocks, parse, shape, spans

from pdactors import client_messages, messages
from pdactors.actors.http.objects import STATUS
from pdactors.cli.main import main
from pdactors.client_messages import AnyEvent, RequestBody
from pdactors.config.fields import SECTIONS
from pdactors.config.load import load
from pdactors.config.reference import reference
from pdactors.kv import codec
from pdactors.policy import codec_choice, placement
from pdactors.sim import cost
from pdactors.transport import ports

FILES = {"cluster.toml", "cost.json", "conversation.jsonl"}  # that commands take
NEEDS_A_CLUSTER = re.compile(r"127\.0\.0\.1:70|\blaunch\(")
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def every(*languages: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("block", blocks(*languages), ids=lambda block: block.place)


# ---- Code blocks --------


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_says_what_it_is(page: Path) -> None:
    openings = page.read_text("utf-8").count("\n```") // 2
    known = blocks("console", "toml", "python", "json", "mermaid", "text", "")
    assert openings == sum(block.page == page for block in known)


@every("toml")
def test_a_cluster_file_loads(block: Block, tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(block.text, "utf-8")
    load(file, environ={})


@pytest.mark.parametrize("file", sorted((ROOT / "examples").glob("*.toml")), ids=lambda file: file.name)
def test_an_example_of_a_cluster_file_loads(file: Path) -> None:
    load(file, environ={})


@every("python")
def test_a_program_compiles_and_runs_where_it_needs_no_cluster(block: Block) -> None:
    code = compile(block.text, block.place, "exec")
    if not NEEDS_A_CLUSTER.search(block.text):
        with patch.dict(codec.FORMS), patch.dict(ports.PORTS), patch.dict(placement.POLICIES):
            exec(code, {"__name__": "__main__"})


@every("json")
def test_what_is_shown_of_the_protocol_can_be_read(block: Block) -> None:
    for line in block.text.splitlines():
        shown = msgspec.json.decode(line, type=dict)
        if shown.keys() & {"prompt", "messages", "prompt_token_ids"}:
            msgspec.convert(shown, RequestBody)
        elif "event" in shown:
            msgspec.convert(shown, AnyEvent)
        else:
            assert shown.keys() <= {"token", "cancel", "error"}


# ---- Commands --------


@every("console")
def test_a_command_line_names_what_exists(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in FILES:
        Path(name).touch()
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for command in block.commands:
        for arguments in command.own:
            parse(arguments)


@every_page
def test_a_command_in_running_text_names_what_exists(page: Path) -> None:
    for span in spans(page):
        words = span.split()
        if words[0] == "pdactors" and len(words) > 1:
            command: click.Command | None = main
            while isinstance(command, click.Group) and len(words) > 1 and words[1].isalpha():
                del words[0]
                command = command.get_command(click.Context(main), words[0])
                assert command is not None, span
            assert command is not None
            options = {name for parameter in command.params for name in parameter.opts} | {"--help"}
            assert {word for word in words if word.startswith("--")} <= options, span


@pytest.mark.parametrize("line", ["pdactors lunch", "pdactors status --loud", "cat x | pdactors bench kv --rounds x"])
def test_a_command_that_does_not_exist_is_found(line: str) -> None:
    (arguments,) = Command(line).own
    with pytest.raises((AssertionError, click.UsageError)):
        parse(arguments)


def test_output_has_the_shape_that_is_shown_if_only_numbers_and_ids_differ() -> None:
    shown = ["run 0a1b2c3d: 12.5 ms", "…", '{"total": 1, …}']
    assert shape(shown).fullmatch('run ffff0000:  3 ms\nmore\nand more\n{"total": 2, "used": 3}')
    assert not shape(shown).fullmatch('walk ffff0000: 3 ms\nmore\n{"total": 2, "used": 3}')


# ---- Names --------


def test_the_reference_of_the_cluster_file_is_what_the_classes_say() -> None:
    committed = (ROOT / "docs" / "cluster-file.md").read_text("utf-8")
    assert committed == reference(), "pdactors config reference > docs/cluster-file.md"
    for section, fields in SECTIONS.items():
        assert all(f"| `{name}` |" in committed for name in fields), section


@every_page
def test_links_lead_to_files(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text("utf-8")):
        assert "://" in target or (page.parent / target).exists(), target


@every_page
def test_paths_and_keys_in_running_text_exist(page: Path) -> None:
    for span in spans(page):
        if re.fullmatch(r"[\w-]+(/[\w-]+)+\.(py|md|toml|json|yaml|sbatch)", span):
            assert (ROOT / span).exists() or (ROOT / "pdactors" / span).exists(), span
        section, _, key = re.split(r"[ =]", span)[0].partition(".")
        if section in SECTIONS and key and key not in ("toml", "key", "pub"):
            assert key in SECTIONS[section] or key.split(".")[-1] in SECTIONS["node"], span


@every_page
def test_metrics_that_are_named_exist(page: Path) -> None:
    source = "".join(file.read_text("utf-8") for file in (ROOT / "pdactors" / "observe").glob("*.py"))
    for name in re.findall(r"\b(?:vllm|pdactors):\w+", page.read_text("utf-8")):
        assert re.search(rf'"{name.removesuffix("_total")}', source), name


def test_every_page_of_docs_is_in_the_list_of_the_readme() -> None:
    readme = (ROOT / "README.md").read_text("utf-8")
    assert [page.name for page in PAGES if page.parent.name == "docs" and f"docs/{page.name})" not in readme] == []


def test_the_protocol_page_has_every_field_code_and_message() -> None:
    text = (ROOT / "docs" / "protocol.md").read_text("utf-8")
    kinds = (*get_args(client_messages.ToGateway), *get_args(client_messages.ToClient))
    fields = {name for kind in (RequestBody, *get_args(AnyEvent)) for name in kind.__struct_fields__}
    codes = {"internal", *STATUS} - {"connection"}  # which is the client's own word
    names = {*fields, *codes, *(kind.__name__ for kind in kinds)}
    assert sorted(name for name in names if f"`{name}" not in text) == []


# ---- Names that stand in several places --------


def test_a_codec_is_known_wherever_one_must_be() -> None:
    names = set(codec.FORMS)
    assert names == set(get_args(codec.CodecName)) == {*get_args(messages.Codec)} - {"none"}
    assert names == set(codec_choice._BY_LOSS) == set(cost._CODEC_RATIOS)
    assert {"none", "auto", *names} == set(_choices("kv", "compression"))


def test_a_policy_and_a_transport_are_known_wherever_they_must_be() -> None:
    policies = set(placement.POLICIES)
    assert policies == set(get_args(placement.PlacementPolicy)) == set(_choices("router", "policy"))
    assert set(ports.PORTS) - {"inproc"} <= set(_choices("kv", "transport")) & set(get_args(messages.Path))


def _choices(section: str, key: str) -> tuple[str, ...]:
    return get_args(get_args(SECTIONS[section][key].type)[0])

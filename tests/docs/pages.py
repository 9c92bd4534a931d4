"""The pages that users read, as data: their code blocks, and what stands in them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import click

from pdactors.cli.main import main

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))
_FENCE = re.compile(r"```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"`([^`\n]+)`")
_TAG = re.compile(r"#.*\[(\w+)\]$")


@dataclass(frozen=True)
class Command:
    """A line after `$`, and the output that the page shows for it."""

    line: str
    output: list[str] = field(default_factory=list)

    @property
    def tag(self) -> str:
        """What a comment's last word in brackets says: why no test runs it; "" if one does."""
        found = _TAG.search(self.line)
        return found[1] if found else ""

    @property
    def own(self) -> Iterator[list[str]]:
        """Yield the arguments of every `pdactors` in it."""
        lexer = shlex.shlex(self.line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        words = list(lexer)
        while "pdactors" in words:
            words = words[words.index("pdactors") + 1 :]
            ends = (i for i, word in enumerate(words) if word and set(word) <= set("|&;()<>"))
            yield words[: next(ends, len(words))]


@dataclass(frozen=True)
class Block:
    """A fenced block: where it begins, its language, its text."""

    page: Path
    line: int
    language: str
    text: str

    @property
    def place(self) -> str:
        return f"{self.page.name}:{self.line}"

    @cached_property
    def commands(self) -> list[Command]:
        """The commands of a console block."""
        found: list[Command] = []
        for line in self.text.replace("\\\n", "").splitlines():
            if line.startswith("$ "):
                found.append(Command(line.removeprefix("$ ")))
            else:
                found[-1].output.append(line)
        return found


def blocks(*languages: str) -> list[Block]:
    """Return the blocks of all pages in these languages."""
    found = []
    for page in PAGES:
        text = page.read_text("utf-8")
        found += [
            Block(page, text.count("\n", 0, match.start()) + 1, match[1], match[2])
            for match in _FENCE.finditer(text)
            if match[1] in languages
        ]
    return found


def spans(page: Path) -> list[str]:
    """Return what stands between backticks in a page's running text."""
    return _SPAN.findall(_FENCE.sub("", page.read_text("utf-8")))


def shape(lines: list[str]) -> re.Pattern[str]:
    """Return what output of this shape matches: any numbers, ids and widths for those shown, anything for `…`."""
    pieces = {"…": ".*", "h": "[0-9a-f]+", "n": r"\d[\d.,]*", "s": r"\s+"}

    def generic(match: re.Match[str]) -> str:
        return pieces[match.lastgroup or match[0]] if match.lastgroup or match[0] == "…" else re.escape(match[0])

    token = re.compile(r"(?P<h>[0-9a-f]{8,})|(?P<n>\d[\d.,]*)|(?P<s>\s+)|.")
    return re.compile("\n".join(".*" if line == "…" else token.sub(generic, line.strip()) for line in lines), re.DOTALL)


def parse(arguments: list[str]) -> None:
    """Have click read a command line without running it; raises UsageError for what it does not know."""
    group = click.Context(main)
    command: click.Command | None = main
    while isinstance(command, click.Group):
        name, *arguments = arguments
        if name.startswith("-"):
            return
        command = command.get_command(group, name)
        assert command is not None, f"there is no command {name}"
    assert command is not None
    try:
        command.make_context(command.name, arguments, parent=group)
    except click.exceptions.Exit:
        pass  # --help

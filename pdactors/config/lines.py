"""Where in a TOML text a key stands. The parser itself says so only for syntax errors."""

from __future__ import annotations

import re
from collections import Counter

_PART = r"""(?:[A-Za-z0-9_-]+|"[^"\n]*"|'[^'\n]*')"""
_DOTTED = rf"{_PART}(?:\s*\.\s*{_PART})*"
_HEADER = re.compile(rf"\s*(?P<open>\[\[?)\s*(?P<name>{_DOTTED})\s*\]")
_ASSIGNMENT = re.compile(rf"\s*(?P<name>{_DOTTED})\s*=\s*(?P<value>.*)")


def key_lines(text: str) -> dict[str, int]:
    """Map "section", "section.key" and "list.INDEX.key" to the line, from 1, that first names it.

    Keys inside inline tables are not found; look up what encloses them.
    """
    lines: dict[str, int] = {}
    seen: Counter[str] = Counter()
    prefix = ""
    closing = ""  # the quotes that end the multi-line string we are in
    for number, line in enumerate(text.split("\n"), start=1):
        if closing:
            closing = "" if closing in line else closing
        elif header := _HEADER.match(line):
            prefix = _plain(header["name"])
            lines.setdefault(prefix, number)
            if header["open"] == "[[":
                seen[prefix] += 1
                prefix = f"{prefix}.{seen[prefix] - 1}"
                lines.setdefault(prefix, number)
        elif assignment := _ASSIGNMENT.match(line):
            name = _plain(assignment["name"])
            lines.setdefault(f"{prefix}.{name}" if prefix else name, number)
            quotes = assignment["value"][:3]
            if quotes in ('"""', "'''") and quotes not in assignment["value"][3:]:
                closing = quotes
    return lines


def _plain(dotted: str) -> str:
    return ".".join(part.strip("\"'") for part in re.findall(_PART, dotted))

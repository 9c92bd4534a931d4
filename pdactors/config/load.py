"""Read a cluster file, the environment and --set into a ClusterConfig, and write the effective one back.

Later sources win: defaults, file, environment, --set. A variable is PDACTORS_<SECTION>_<KEY>, the section being all up
to the first underscore (PDACTORS_KV_BLOCK_TOKENS is kv.block_tokens), for nodes PDACTORS_NODE_<INDEX>_<KEY>. There and
in --set a value is TOML; where a string is wanted the quotes may be left out. Other PDACTORS_ names are errors, but for
PDACTORS_HOME and PDACTORS_LOG*.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from pdactors.config.check import problems
from pdactors.config.cluster import SECRETS, ClusterConfig, Section
from pdactors.config.fields import SECTIONS, Field, toml_value
from pdactors.config.lines import key_lines
from pdactors.errors import ConfigError

PREFIX = "PDACTORS_"
_MAX_FILE_BYTES = 2**20


def load(path: Path | None, *, sets: Sequence[str] = (), environ: Mapping[str, str] = os.environ) -> ClusterConfig:
    """Build the effective configuration; raises ConfigError that lists every mistake with its place, one a line."""
    draft = _Draft()
    if path is not None:
        draft.read(Path(path))
    draft.raise_errors()
    for name, text in environ.items():
        if name.startswith(PREFIX) and name != "PDACTORS_HOME" and not name.startswith("PDACTORS_LOG"):
            draft.override(_variable_key(name), text, f"environment variable {name}")
    for argument in sets:
        key, equals, text = argument.partition("=")
        if not equals:
            shown = re.match(r"[\w.-]*", argument)
            draft.errors.append(f"--set {shown[0] if shown else ''}: write SECTION.KEY=VALUE")
            continue
        value = "***" if _may_be_secret(key) else text
        draft.override(key.strip(), text, f"--set {key}={value}")
    draft.raise_errors()
    cfg = msgspec.convert(draft.tables, ClusterConfig)  # each value was checked where it came from
    draft.errors += [f"{draft.place(*problem.keys)}{problem.text}" for problem in problems(cfg)]
    draft.raise_errors()
    return cfg


def is_secret(key: str) -> bool:
    """Say whether the value of `section.key` is never to be shown."""
    section, _, name = key.partition(".")
    return section == "security" and name in SECRETS


def _may_be_secret(key: str) -> bool:
    """Say whether a key is a secret's, or could be one's that was misspelt."""
    section, _, name = key.strip().rpartition(".")
    return name in SECRETS or (section == "security" and name not in SECTIONS["security"])


def variable_of(key: str) -> str:
    """Return the environment variable that sets `section.key`."""
    return PREFIX + key.replace(".", "_").upper()


def show(cfg: ClusterConfig, *, secrets: bool = False) -> str:
    """Write the configuration as TOML with comments; secrets show as "***" unless asked for."""
    parts = []
    for name, fields in SECTIONS.items():
        value = getattr(cfg, name)
        for section in value if name == "node" else (value,):
            header = "[[node]]" if name == "node" else f"[{name}]"
            parts.append("\n".join([header, *(_shown(field, section, secrets) for field in fields.values())]))
    return "\n\n".join(parts) + "\n"


def _shown(field: Field, section: Section, secrets: bool) -> str:
    value = getattr(section, field.name)
    note = "" if value == field.default else f"; default {toml_value(field.default)}"
    if field.name in SECRETS and value and not secrets:
        value = "***"
    return f"{field.name} = {toml_value(value)}  # {field.doc}{note}"


class _Draft:
    """Settings as they come in, where each came from, and what is wrong with them."""

    def __init__(self) -> None:
        self.tables: dict[str, Any] = {}  # section -> {key: value}, node -> [{key: value}]
        self.errors: list[str] = []
        self._path: Path | None = None
        self._lines: dict[str, int] = {}
        self._origins: dict[str, str] = {}  # of keys that are not the file's

    def raise_errors(self) -> None:
        if self.errors:
            raise ConfigError("\n".join(self.errors))

    def place(self, *keys: str) -> str:
        """Where the first of the keys that anyone set was set, ready to stand before a message."""
        for key in keys:
            if key in self._origins:
                return f"{self._origins[key]}: "
            if key in self._lines:
                return f"{self._path}:{self._lines[key]}: "
        for key in keys:
            while key := key.rpartition(".")[0]:
                if key in self._lines:
                    return f"{self._path}:{self._lines[key]}: "
        return f"{self._path}: " if self._path else ""

    def read(self, path: Path) -> None:
        """Take in a cluster file."""
        self._path = path
        text = _text(path)
        try:
            tables = tomllib.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(_syntax(path, text, str(error))) from None
        self._lines = key_lines(text)
        for section, table in tables.items():
            if section not in SECTIONS:
                self._wrong(section, _unknown_section(section))
            elif section == "node":
                self._read_nodes(table)
            elif not isinstance(table, dict):
                self._wrong(section, f"expected a table, [{section}]")
            else:
                self._check_table(section, section, table)
        self.tables = tables

    def _read_nodes(self, nodes: object) -> None:
        if not (isinstance(nodes, list) and nodes and all(isinstance(node, dict) for node in nodes)):
            self._wrong("node", "expected at least one table, [[node]]")
            return
        for index, node in enumerate(nodes):
            self._check_table("node", f"node.{index}", node)

    def _check_table(self, section: str, prefix: str, table: dict[str, Any]) -> None:
        for name, value in table.items():
            if name not in SECTIONS[section]:
                self._wrong(f"{prefix}.{name}", _unknown_key(section, name))
            else:
                self._check_value(f"{prefix}.{name}", SECTIONS[section][name], value)

    def _check_value(self, key: str, field: Field, value: object) -> None:
        if fault := field.fault(value):
            shown = "***" if field.name in SECRETS else _brief(value)
            self.errors.append(f"{self.place(key)}{key} = {shown}: {fault}")

    def _wrong(self, key: str, text: str) -> None:
        self.errors.append(f"{self.place(key)}{key}: {text}")

    def override(self, key: str, text: str, origin: str) -> None:
        """Set one key from outside the file; nodes go by index or name."""
        section, _, name = key.partition(".")
        table, prefix = self.tables, section
        try:
            if section not in SECTIONS:
                raise ConfigError(_unknown_section(section))
            if section == "node":
                selector, _, name = name.rpartition(".")
                prefix, table = self._node(selector)
            if not name:
                raise ConfigError("names a section; name one of its keys")
            if name not in SECTIONS[section]:
                raise ConfigError(_unknown_key(section, name))
            value = _value(SECTIONS[section][name], text.strip())
        except ConfigError as error:
            self.errors.append(f"{origin}: {key}: {error}")
            return
        key = f"{prefix}.{name}"
        self._origins[key] = origin
        self._check_value(key, SECTIONS[section][name], value)
        (table if section == "node" else table.setdefault(section, {}))[name] = value

    def _node(self, selector: str) -> tuple[str, dict[str, Any]]:
        nodes = self.tables.setdefault("node", [{}])
        names = [node.get("name", SECTIONS["node"]["name"].default) for node in nodes]
        if selector in names:
            index = names.index(selector)
        elif selector.isascii() and selector.isdecimal() and int(selector[:9]) < len(nodes):
            index = int(selector)
        else:
            raise ConfigError(f"no such node; write node.INDEX.KEY or node.NAME.KEY, known: {', '.join(names)}")
        return f"node.{index}", nodes[index]


def _variable_key(name: str) -> str:
    """PDACTORS_KV_BLOCK_TOKENS -> kv.block_tokens; PDACTORS_NODE_0_DECODE -> node.0.decode."""
    section, _, key = name.removeprefix(PREFIX).lower().partition("_")
    if section == "node":
        key = key.replace("_", ".", 1)
    return f"{section}.{key}" if key else section


def _value(field: Field, text: str) -> object:
    """Read a value from outside the file: TOML, and where a string is wanted anything else as it stands."""
    try:
        text.encode()
        if not field.takes_text or text[:1] in ('"', "'"):
            return tomllib.loads(f"value = {text}")["value"]
    except UnicodeEncodeError:
        raise ConfigError("not valid UTF-8") from None
    except (ValueError, RecursionError):
        pass
    return text


def _text(path: Path) -> str:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    if len(data) > _MAX_FILE_BYTES:
        raise ConfigError(f"{path}: {len(data)} bytes is more than a cluster file may have, {_MAX_FILE_BYTES}")
    try:
        return data.decode().replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise ConfigError(f"{path}:{line}: not valid UTF-8 ({error.reason})") from None


def _syntax(path: Path, text: str, message: str) -> str:
    ended = message.removesuffix(" (at end of document)")
    if ended != message:
        return f"{path}:{len(text.splitlines())}: {ended} (end of file)"
    found = re.fullmatch(r"(.*) \(at line (\d+), column (\d+)\)", message, re.DOTALL)
    return f"{path}:{found[2]}: {found[1]} (column {found[3]})" if found else f"{path}: {message}"


def _unknown_section(name: str) -> str:
    homes = [section for section, fields in SECTIONS.items() if name in fields]
    if homes:
        return f"unknown section; this is a key of {_brackets(homes)}"
    return f"unknown section; {_nearest(name, SECTIONS)}"


def _unknown_key(section: str, name: str) -> str:
    homes = [other for other, fields in SECTIONS.items() if name in fields]
    if homes:
        return f"unknown key in [{section}]; it belongs to {_brackets(homes)}"
    return f"unknown key; {_nearest(name, SECTIONS[section])}"


def _brackets(sections: Sequence[str]) -> str:
    return " or ".join("[[node]]" if section == "node" else f"[{section}]" for section in sections)


def _nearest(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name.lower(), list(known), n=2, cutoff=0.5)
    return "did you mean " + " or ".join(near) + "?" if near else "known: " + ", ".join(known)


def _brief(value: object) -> str:
    try:
        text = toml_value(value)
    except (TypeError, ValueError):  # a date, or a number of thousands of digits
        text = f"({type(value).__name__})"
    return text if len(text) <= 80 else text[:77] + "..."

"""The reference of the cluster file, docs/cluster-file.md, written from the schema."""

from __future__ import annotations

from typing import get_type_hints

from pdactors.config.cluster import ClusterConfig, NodeSection
from pdactors.config.fields import SECTIONS, Field, toml_value

_HEAD = """\
# The cluster file

Written by `pdactors config reference` from `pdactors/config/cluster.py`; a test holds that this page is what it prints.

A cluster file is TOML. Every section and key may be left out. An unknown key, a wrong type and a value out of range are
errors that name the key, the file and the line, and so are values that do not fit together. `pdactors config show FILE`
prints the file as it takes effect.

| later ones win | example |
|---|---|
| the file | `[kv]` and below it `memory = "1GiB"` |
| environment | `PDACTORS_KV_MEMORY=1GiB`; of a node, by its place in the file: `PDACTORS_NODE_0_DECODE=2` |
| command line | `--set kv.memory=1GiB`; of a node, by its place or its name: `--set node.n0.decode=2` |
"""


def reference() -> str:
    """Return the page, in Markdown: a section for each table of the file, a row for each of its keys."""
    kinds = get_type_hints(ClusterConfig)
    parts = [_HEAD]
    for name, fields in SECTIONS.items():
        title = "[[node]]" if name == "node" else f"[{name}]"
        kind = NodeSection if name == "node" else kinds[name]
        rows = "".join(_row(field) for field in fields.values())
        parts.append(f"## {title}\n\n{kind.__doc__}\n\n| key | default | takes | meaning |\n|---|---|---|---|\n{rows}")
    return "\n".join(parts)


def _row(field: Field) -> str:
    cells = (f"`{field.name}`", f"`{toml_value(field.default)}`", field.expected, field.doc)
    escaped = (cell.replace("|", "\\|") for cell in cells)
    return f"| {' | '.join(escaped)} |\n"

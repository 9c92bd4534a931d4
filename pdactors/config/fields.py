"""The schema of cluster.toml as data: what each key is called, takes, means, and is without a setting."""

from __future__ import annotations

import json
from dataclasses import dataclass
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from pdactors.config.cluster import ClusterConfig, NodeSection, Section


@dataclass(frozen=True)
class Field:
    """One key of one section."""

    section: str
    name: str
    type: Any  # Annotated[..., msgspec.Meta]
    doc: str
    default: Any

    @property
    def takes_text(self) -> bool:
        """Say whether a string is a legal type, so that a bare word needs no quotes."""
        base = get_args(self.type)[0]
        return base is str or (get_origin(base) in (Union, UnionType) and str in get_args(base))

    @property
    def expected(self) -> str:
        """What may stand there, in words."""
        base, meta = get_args(self.type)
        if get_origin(base) is Literal:
            return "one of " + ", ".join(toml_value(choice) for choice in get_args(base))
        kinds = {int: "a whole number", float: "a number", bool: "true or false", str: "a string"}
        return kinds.get(base, "a string or a whole number") + _range(meta)

    def fault(self, value: object) -> str | None:
        """Say what is wrong with `value`; None when it is of the right type and within the range."""
        try:
            msgspec.convert(value, self.type)
        except msgspec.ValidationError:
            return f"expected {self.expected}"
        return None


def _range(meta: msgspec.Meta) -> str:
    if meta.min_length is not None:
        return f" of at least {meta.min_length} character"
    if meta.le is None:
        return ""
    return f" from {meta.ge} to {meta.le}" if meta.gt is None else f" more than {meta.gt} and at most {meta.le}"


def _fields(section: str, kind: type[Section]) -> dict[str, Field]:
    hints, default = get_type_hints(kind, include_extras=True), kind()
    return {
        name: Field(section, name, hints[name], get_args(hints[name])[1].description, getattr(default, name))
        for name in kind.__struct_fields__
    }


SECTIONS: dict[str, dict[str, Field]] = {
    section: _fields(section, NodeSection if section == "node" else kind)
    for section, kind in get_type_hints(ClusterConfig).items()
    if section in ClusterConfig.__struct_fields__
}


def toml_value(value: object) -> str:
    """Write one value of a cluster file as TOML."""
    # A JSON string is a TOML basic string but for DEL, which TOML wants escaped.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")

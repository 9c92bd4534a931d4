"""A model's chat template, rendered in a sandbox with the names that such templates expect."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pdactors.errors import BadRequest, ModelError

# What a template's own code can raise on a conversation that it was not written for.
_RENDER_ERRORS = (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError)


class ChatTemplate:
    """Compiled once; `where` names it in errors.

    Raises:
        ModelError: the template does not compile.
    """

    def __init__(self, source: str, where: str) -> None:
        self._where = where
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise ModelError(f"{where} does not compile: {error}") from error

    def render(self, messages: Sequence[Mapping[str, str]], named_tokens: Mapping[str, str]) -> str:
        """Render up to where the assistant's answer begins. Raises BadRequest when the template refuses."""
        try:
            return self._template.render(
                **named_tokens, messages=list(messages), tools=None, documents=None, add_generation_prompt=True
            )
        except _RENDER_ERRORS as error:
            raise BadRequest(f"{self._where} refuses these messages: {error}") from error


class _Generation(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's text for training; here it is only its body."""

    tags = {"generation"}  # noqa: RUF012  declared so by jinja2

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON; jinja2's own filter escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)

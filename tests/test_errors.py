"""The tree of errors and its codes."""

from __future__ import annotations

import inspect
import re

import pytest

from pdactors import errors
from pdactors.errors import BadRequest, PDError, PromptTooLong, error_for

CLASSES = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if kind.__module__ == errors.__name__]
LINE = re.compile(r"^(?P<indent>[| `-]*)(?P<name>\w+) {2,}(?:code \"(?P<root>\w+)\"|(?P<code>\w+)) ", re.MULTILINE)


def drawn() -> dict[str, tuple[str, str | None]]:
    """Read the docstring's tree: class name -> code and parent."""
    tree: dict[str, tuple[str, str | None]] = {}
    path: list[tuple[int, str]] = []
    for line in LINE.finditer(errors.__doc__ or ""):
        depth = len(line["indent"])
        path = [(d, name) for d, name in path if d < depth]
        tree[line["name"]] = (line["root"] or line["code"], path[-1][1] if path else None)
        path.append((depth, line["name"]))
    return tree


def test_the_tree_in_the_docstring_is_the_tree():
    assert drawn() == {
        kind.__name__: (kind.code, None if kind is PDError else kind.__bases__[0].__name__) for kind in CLASSES
    }
    assert len(CLASSES) == 12


def test_codes_are_distinct():
    assert len({kind.code for kind in CLASSES}) == len(CLASSES)


@pytest.mark.parametrize("kind", CLASSES)
def test_an_error_is_rebuilt_from_its_code(kind):
    error = error_for(kind.code, "why", 2.5)
    assert type(error) is kind
    assert (error.code, error.message, error.retry_after_s, str(error)) == (kind.code, "why", 2.5, "why")


@pytest.mark.parametrize("code", ["", "unknown", "Overloaded", "bad request"])
def test_an_unknown_code_gives_the_base(code):
    error = error_for(code, "why")
    assert type(error) is PDError
    assert (error.code, error.message, error.retry_after_s) == ("internal", "why", None)


def test_a_child_is_caught_as_its_parent():
    with pytest.raises(BadRequest):
        raise error_for(PromptTooLong.code, "long")

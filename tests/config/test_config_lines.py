from __future__ import annotations

from pdactors.config.lines import key_lines

TEXT = '''# a comment
top = 1
[kv]            # [not.a.section]
  block_tokens = 32
"quoted" = """
[fake]
inside = 1
"""
after = \'\'\'one line\'\'\'
[a.b]
c.d = { e = 1 }
[[node]]
name = "x"
 [[ node ]]
name = "y"
'''


def test_every_key_is_found_at_its_line_and_text_inside_strings_is_not() -> None:
    assert key_lines(TEXT) == {
        "top": 2,
        "kv": 3,
        "kv.block_tokens": 4,
        "kv.quoted": 5,
        "kv.after": 9,
        "a.b": 10,
        "a.b.c.d": 11,
        "node": 12,
        "node.0": 12,
        "node.0.name": 13,
        "node.1": 14,
        "node.1.name": 15,
    }


def test_an_empty_text_has_no_keys() -> None:
    assert key_lines("") == {}

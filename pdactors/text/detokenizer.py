"""Token ids to text, one token at a time. The pieces put together are exactly what decoding all ids at once gives."""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Protocol

from pdactors.text.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"


class Detokenizer:
    """The text of one answer.

    `prompt_tail` are ids that stand before the answer; they give no text, but the first token is spelled as it is
    after them (a leading space is kept, a character begun in the prompt is completed).
    """

    def __init__(self, tokenizer: Tokenizer, prompt_tail: Sequence[int] = ()) -> None:
        tail = [token_id for token_id in prompt_tail if _has_text(tokenizer, token_id)]
        self._special_ids = tokenizer.special_ids
        kinds = list(_decoder_kinds(tokenizer.decoder))
        self._method: _Method
        if kinds == ["ByteLevel"]:
            self._method = _Bytes(tokenizer, tail)
        else:
            self._method = _Window(tokenizer, tail, byte_fallback="ByteFallback" in kinds)

    def push(self, token_id: int) -> str:
        """Take the next token; returns the text that is certain now, "" while a character is incomplete."""
        return "" if token_id in self._special_ids else self._method.push(token_id)

    def flush(self) -> str:
        """End the answer; returns the text that was held back."""
        return self._method.flush()


def token_bytes(tokenizer: Tokenizer, token_id: int) -> bytes:
    """Return the bytes of one token by itself; they may be a part of a character. Special tokens give their name."""
    token = tokenizer.token(token_id) or ""
    kinds = list(_decoder_kinds(tokenizer.decoder))
    if kinds == ["ByteLevel"] and token_id not in tokenizer.special_ids:
        return _token_bytes(token)
    if "ByteFallback" in kinds and token_id in tokenizer.byte_ids:
        return bytes.fromhex(token[3:5])  # <0x0A>
    return (tokenizer.decode([token_id]) or token).encode("utf-8")


class _Method(Protocol):
    def push(self, token_id: int) -> str: ...

    def flush(self) -> str: ...


class _Bytes:
    """Byte-level vocabularies: a token is a string of bytes, so an incremental UTF-8 decoder is exact."""

    def __init__(self, tokenizer: Tokenizer, tail: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        for token_id in tail:
            self.push(token_id)

    def push(self, token_id: int) -> str:
        return self._utf8.decode(_token_bytes(self._tokenizer.token(token_id) or ""))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class _Window:
    """Any other vocabulary: decode a short window of ids twice and give what the newest ones add.

    The window begins with the ids of the last text given, because a token's text can depend on what stands before
    it (a leading space). A run of byte tokens is held until it ends: only then is its text known, because one
    invalid byte turns every byte of the run into a replacement character.
    """

    # ids:  [ ... given before ... | given last | held ]
    #                              ^ 0          ^ read
    def __init__(self, tokenizer: Tokenizer, tail: Sequence[int], *, byte_fallback: bool) -> None:
        self._tokenizer = tokenizer
        self._byte_ids = tokenizer.byte_ids if byte_fallback else frozenset()
        self._ids = list(tail)
        self._read = len(self._ids)
        self._given = tokenizer.decode(self._ids).rstrip(_REPLACEMENT) if self._ids else ""

    def push(self, token_id: int) -> str:
        if self._tokenizer.token(token_id) is None:
            return ""
        self._ids.append(token_id)
        if token_id in self._byte_ids:
            return ""
        text = self._tokenizer.decode(self._ids)
        if len(text) <= len(self._given) or text.endswith(_REPLACEMENT) or not text.startswith(self._given):
            return ""
        return self._give(text)

    def flush(self) -> str:
        return self._give(self._tokenizer.decode(self._ids)) if self._read < len(self._ids) else ""

    def _give(self, text: str) -> str:
        new = text[len(self._given) :]
        self._ids = self._ids[self._read :]
        self._read = len(self._ids)
        self._given = self._tokenizer.decode(self._ids)
        return new


def _has_text(tokenizer: Tokenizer, token_id: int) -> bool:
    """Decoding skips special tokens and ids outside the vocabulary."""
    return token_id not in tokenizer.special_ids and tokenizer.token(token_id) is not None


def _decoder_kinds(decoder: Mapping[str, Any]) -> Iterator[str]:
    if decoder.get("type") == "Sequence":
        for part in decoder["decoders"]:
            yield from _decoder_kinds(part)
    else:
        yield decoder.get("type", "")


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable ones as themselves, the others as characters from U+0100 on, in order."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [value for value in range(256) if value not in printable]
    return {chr(value): value for value in printable} | {chr(256 + n): value for n, value in enumerate(others)}


_BYTES = _byte_alphabet()


@lru_cache(maxsize=1 << 18)  # tokens of every vocabulary in use, each spelled once
def _token_bytes(token: str) -> bytes:
    try:
        return bytes([_BYTES[character] for character in token])
    except KeyError:  # an added token, spelled as plain text
        return token.encode("utf-8")

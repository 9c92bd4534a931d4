"""`LineReader`: the lines that one client sends, bounded in length and time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from pdactors.errors import BadRequest, RequestTimeout

PIECE_BYTES = 1 << 16  # read at once
LINE_S = 20.0  # from a line's first byte to its last


class LineTooLong(BadRequest):
    """The line protocol's connection ends here."""


class LineTooLate(RequestTimeout):
    """And here."""


class LineReader:
    """Reads lines from a stream; `hold` is told how many bytes of an unfinished one there are."""

    def __init__(self, reader: asyncio.StreamReader, clock: Callable[[], float], hold: Callable[[int], None]) -> None:
        self._reader = reader
        self._clock = clock
        self._hold = hold
        self._input = bytearray()
        self._searched = 0  # so much of it has no line's end
        self._begun_s = 0.0

    async def next(self, max_bytes: int, within_s: float | None = None) -> bytes | None:
        """Return the next line without its end, None at the end of input. It may be as long in coming as it likes,
        if not `within_s`, but not from its first byte on.

        Raises:
            LineTooLong: it has more than `max_bytes`.
            LineTooLate: it takes too long.
        """
        asked_s = self._clock()
        while (end := self._input.find(b"\n", self._searched)) < 0 and len(self._input) <= max_bytes:
            self._searched = len(self._input)
            self._hold(self._searched)
            if within_s is not None:
                until_s: float | None = asked_s + within_s
            else:
                until_s = self._begun_s + LINE_S if self._input else None
            piece = await self._read(until_s)
            if not piece:
                break
            if not self._input:
                self._begun_s = self._clock()
            self._input += piece
        is_ended = end >= 0
        line = bytes(self._input[:end]) if is_ended else bytes(self._input)
        if len(line) > max_bytes:
            raise LineTooLong(f"line: longer than {max_bytes} bytes")
        del self._input[: len(line) + is_ended]
        self._searched, self._begun_s = 0, self._clock()
        self._hold(len(self._input))
        return line.removesuffix(b"\r") if line or is_ended else None

    async def _read(self, until_s: float | None) -> bytes:
        try:
            async with asyncio.timeout(None if until_s is None else until_s - self._clock()):
                return await self._reader.read(PIECE_BYTES)
        except TimeoutError:
            raise LineTooLate("line: its end took too long") from None

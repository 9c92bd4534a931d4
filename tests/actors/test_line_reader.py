from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdactors.actors import line_reader
from pdactors.actors.line_reader import LineReader, LineTooLate, LineTooLong

LIMIT = 20


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def reader_of(*pieces: bytes, eof: bool = True) -> tuple[LineReader, asyncio.StreamReader, Clock, list[int]]:
    stream, clock, held = asyncio.StreamReader(), Clock(), [0]
    for piece in pieces:
        stream.feed_data(piece)
    if eof:
        stream.feed_eof()
    return LineReader(stream, clock, held.append), stream, clock, held


@given(st.lists(st.binary(max_size=30).map(lambda data: data.replace(b"x", b"\n")), max_size=8))
def test_lines_are_what_splitting_gives_up_to_the_first_that_is_too_long(pieces: list[bytes]) -> None:
    async def read() -> None:
        stream = asyncio.StreamReader()
        lines = LineReader(stream, Clock(), lambda _: None)
        found: list[bytes] = []

        async def collect() -> str:
            try:
                while (line := await lines.next(LIMIT)) is not None:
                    found.append(line)
            except LineTooLong:
                return "too long"
            return "end"

        collecting = asyncio.create_task(collect())
        for piece in pieces:
            stream.feed_data(piece)
            await asyncio.sleep(0)
        stream.feed_eof()
        end = await collecting
        expected = b"".join(pieces).split(b"\n")
        if not expected[-1]:
            del expected[-1]
        short = [line for line in expected if len(line) <= LIMIT]
        cut = next((i for i, line in enumerate(expected) if len(line) > LIMIT), None)
        assert end == ("end" if cut is None else "too long")
        assert found == [line.removesuffix(b"\r") for line in (short if cut is None else expected[:cut])]

    asyncio.run(read())


async def test_an_endless_line_is_not_kept() -> None:
    lines, *_ = reader_of(b"y" * 1000, eof=False)
    with pytest.raises(LineTooLong):
        await lines.next(LIMIT)


async def test_what_is_held_is_told_and_let_go() -> None:
    lines, stream, _, held = reader_of(b"abc", eof=False)
    reading = asyncio.create_task(lines.next(LIMIT))
    await asyncio.sleep(0.01)
    assert held[-1] == 3
    stream.feed_data(b"d\nef")
    assert await reading == b"abcd"
    assert held[-1] == 2


async def test_a_line_that_has_begun_must_end_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_reader, "LINE_S", 0.05)
    lines, stream, clock, _ = reader_of(eof=False)
    reading = asyncio.create_task(lines.next(LIMIT))
    await asyncio.sleep(0.1)
    assert not reading.done()  # it may be as long in coming as it likes
    for _ in range(10):
        stream.feed_data(b"y")
        clock.now += 0.01
        await asyncio.sleep(0)
    with pytest.raises(LineTooLate):
        await reading


async def test_a_first_line_may_be_asked_for_within_a_time() -> None:
    lines, *_ = reader_of(eof=False)
    with pytest.raises(LineTooLate):
        await lines.next(LIMIT, 0.01)

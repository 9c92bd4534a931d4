"""The load generator: sends requests when they are due and notes when each token came. Knows no protocol."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from msgspec import Struct

from pdactors.bench.workload import Request
from pdactors.errors import PDError, RequestTimeout

Done = Callable[[int], None]  # told how many requests have ended


class Answer(Struct, frozen=True):
    """What a server says of an answer that it finished."""

    num_tokens: int
    cached_tokens: int = 0
    path: str = "none"


class Target(Protocol):
    """A server that can be asked."""

    async def ask(self, request: Request, stamps: list[float]) -> Answer:
        """Ask, and add the loop's time to `stamps` for each token as it comes; leaving early cancels the request.

        Raises:
            PDError: the server refused or failed the request, or is gone.
        """


class Record(Struct, frozen=True):
    """How one request went. Times are seconds from the beginning of the run; a failed one names its error's code."""

    kind: str
    prompt_tokens: int
    begin_s: float  # when it was due in an open loop, so that a late generator hides nothing; else when it was sent
    sent_s: float
    stamps: tuple[float, ...]
    end_s: float
    num_tokens: int = 0
    cached_tokens: int = 0
    path: str = "none"
    error: str | None = None
    reason: str = ""


def _untold(_ended: int) -> None:
    pass


async def open_loop(
    target: Target, requests: Sequence[Request], *, patience_s: float, done: Done = _untold
) -> list[Record]:
    """Send each request when it is due, whatever became of the others; one takes at most `patience_s`."""
    run = _Run(target, patience_s, done)
    async with asyncio.TaskGroup() as group:
        for request in requests:
            await asyncio.sleep(run.begin_s + request.at_s - run.now())
            group.create_task(run.ask(request, request.at_s))
    return run.records


async def closed_loop(
    target: Target,
    requests: Iterable[Request],
    concurrency: int,
    *,
    patience_s: float,
    seconds: float = float("inf"),
    done: Done = _untold,
) -> list[Record]:
    """Keep `concurrency` requests in flight until there are no more or `seconds` are over; then await the last ones."""
    run = _Run(target, patience_s, done)
    waiting = iter(requests)

    async def work() -> None:
        while run.now() - run.begin_s < seconds and (request := next(waiting, None)) is not None:
            await run.ask(request, run.now() - run.begin_s)

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(work())
    return run.records


class _Run:
    """One run of the generator: its beginning, and what it has noted."""

    def __init__(self, target: Target, patience_s: float, done: Done) -> None:
        self.now = asyncio.get_running_loop().time
        self.begin_s = self.now()
        self.records: list[Record] = []
        self._target = target
        self._patience_s = patience_s
        self._done = done

    async def ask(self, request: Request, begin_s: float) -> None:
        """Ask, and note how it went."""
        sent_s = self._elapsed()
        stamps: list[float] = []
        answer = Answer(0)
        error: PDError | None = None
        try:
            async with asyncio.timeout(self._patience_s):
                answer = await self._target.ask(request, stamps)
        except TimeoutError:
            error = RequestTimeout(f"no end after {self._patience_s:.0f} s")
        except PDError as failure:
            error = failure
        self.records.append(
            Record(
                kind=request.kind,
                prompt_tokens=len(request.prompt),
                begin_s=begin_s,
                sent_s=sent_s,
                stamps=tuple(stamp - self.begin_s for stamp in stamps),
                end_s=self._elapsed(),
                num_tokens=answer.num_tokens,
                cached_tokens=answer.cached_tokens,
                path=answer.path,
                error=None if error is None else error.code,
                reason="" if error is None else error.message,
            )
        )
        self._done(len(self.records))

    def _elapsed(self) -> float:
        return self.now() - self.begin_s

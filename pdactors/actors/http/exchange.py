"""`Exchange`: the requests at the gateway that one HTTP request stands for, and what they are answered."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from pdactors.client_messages import AnyEvent, RequestBody, TokenEvent

if TYPE_CHECKING:
    from pdactors.actors.gateway import Gateway

MAX_UNREAD_EVENTS = 16_384  # that wait for a client that does not read


class Exchange:
    """Submits requests, collects their events, and cancels what is still under way when it is left."""

    def __init__(self, gateway: Gateway, bodies: Sequence[RequestBody], id: str) -> None:
        self._gateway = gateway
        self._bodies = bodies
        self._id = id
        self._events: list[tuple[int, AnyEvent]] = []
        self._requests: dict[int, str] = dict.fromkeys(range(len(bodies)), "")
        self._changed = asyncio.Event()
        self.prompt_uses: dict[int, tuple[int, int]] = {}  # of answers that have begun: tokens, and those cached
        self.is_left = False

    async def begin(self) -> None:
        """Submit the requests. Others get their turn in between: each prompt may take a while to tokenise."""
        for index, body in enumerate(self._bodies):
            if self.is_left:
                return
            request = self._gateway.submit(body, self._id, partial(self._take, index))
            if index in self._requests:
                self._requests[index] = request
            await asyncio.sleep(0)

    async def batches(self) -> AsyncIterator[list[tuple[int, AnyEvent]]]:
        """Yield events with the index of their request, as they come, until all have ended or the exchange is left."""
        while not self.is_left and (self._events or self._requests):
            await self._changed.wait()
            self._changed.clear()
            batch, self._events = self._events, []
            if batch:
                yield batch

    def leave(self) -> None:
        """Cancel what has not ended, and end `batches`; idempotent."""
        self.is_left = True
        requests, self._requests = self._requests, {}
        for request in requests.values():
            self._gateway.cancel(request)
        self._changed.set()

    def _take(self, index: int, event: AnyEvent) -> None:
        if not isinstance(event, TokenEvent):
            self._requests.pop(index, None)
        if self.is_left:
            return
        if isinstance(event, TokenEvent) and event.index == 0:
            self.prompt_uses[index] = self._gateway.answers[self._requests[index]].prompt_use
        self._events.append((index, event))
        self._changed.set()
        if len(self._events) > MAX_UNREAD_EVENTS:
            self._gateway.log.warning("client cut off", reason="it does not read", unread_events=len(self._events))
            self.leave()

"""What a listener or a channel of a test receives."""

from __future__ import annotations

import asyncio


class Inbox:
    def __init__(self, patience_s: float = 10) -> None:
        self.messages: asyncio.Queue[tuple[bytes, list[bytes]]] = asyncio.Queue()
        self._patience_s = patience_s

    def __call__(self, peer: bytes, frames: list[bytes]) -> None:
        self.messages.put_nowait((peer, frames))

    async def next(self) -> tuple[bytes, list[bytes]]:
        return await asyncio.wait_for(self.messages.get(), self._patience_s)

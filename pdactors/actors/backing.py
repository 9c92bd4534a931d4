"""`Backing`: Mooncake Store behind a node's own store: blocks go there once they are published, and come by digest.

It works in one thread of its own. Whoever waits for that does so for a bounded time; blocks that the thread may still
write or read stay in use until it has returned. What cannot be had is computed again.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np

from pdactors.actors.transfer_log import TransferLog
from pdactors.config.logging import get_logger
from pdactors.errors import ConfigError, PDError
from pdactors.kv import frame
from pdactors.kv.arena import Arena
from pdactors.kv.blocks import BlockPool
from pdactors.messages import Direction
from pdactors.transport.mooncake import MooncakeClient

BATCH_BLOCKS = 16
MAX_PENDING = 256  # blocks that wait to be stored; what comes then is not
REST_S = 5.0  # that a store which failed is left alone
OPEN_S = 20.0

T = TypeVar("T")


class Backing:
    """Blocks of `arena` by digest, in a store outside the cluster. Each has its checksum in an object beside it."""

    def __init__(self, arena: Arena, pool: BlockPool, clock: Callable[[], float], transfers: TransferLog) -> None:
        self._payload = arena.payload()
        self._pool = pool
        self._clock = clock
        self._transfers = transfers
        self._log = get_logger(part="mooncake")
        self._checksums = np.zeros((BATCH_BLOCKS, 8), np.uint8)
        self._pending: deque[tuple[bytes, int]] = deque()  # digest and block, which has a reference
        self._thread = ThreadPoolExecutor(1, "mooncake")
        self._client: MooncakeClient | None = None
        self._resting_until = 0.0
        self._woken = asyncio.Event()

    async def open(self, address: str, host: str, segment_bytes: int) -> None:
        """Join the store.

        Raises:
            ConfigError: it cannot be had, or not in time.
        """
        memory = [self._payload.reshape(-1), self._checksums.reshape(-1)]
        try:
            async with asyncio.timeout(OPEN_S):
                self._client = await self._in_thread(MooncakeClient, address, host, segment_bytes, memory)
        except TimeoutError:
            raise ConfigError(f"kv.store = mooncake://{address}: joining it took more than {OPEN_S:g} s") from None

    def close(self) -> None:
        """Leave the store, without waiting for what is under way."""
        if self._client is not None:
            self._thread.submit(self._client.close)
        self._thread.shutdown(wait=False)

    @property
    def is_well(self) -> bool:
        """Whether the store is joined, and did not fail just now."""
        return self._client is not None and self._clock() >= self._resting_until

    def rest(self, reason: str) -> None:
        """Leave the store alone for a while."""
        if self.is_well:
            self._log.warning("Mooncake Store fails", reason=reason, rests_s=REST_S)
        self._resting_until = self._clock() + REST_S

    # ---- Storing --------

    def store(self, digests: Sequence[bytes], blocks: Sequence[int]) -> None:
        """Have full blocks of the pool written in the background; some may never be."""
        for digest, block in zip(digests, blocks, strict=True):
            if self.is_well and len(self._pending) < MAX_PENDING:
                self._pool.retain([block])
                self._pending.append((digest, block))
        self._woken.set()

    async def serve(self) -> None:
        """Write what waits, for ever."""
        while True:
            while self._pending:
                batch = [self._pending.popleft() for _ in range(min(BATCH_BLOCKS, len(self._pending)))]
                await self._transfer("send", self._put, batch)
                self._pool.free([block for _, block in batch])
                if not self.is_well:
                    self._pool.free([block for _, block in self._pending])
                    self._pending.clear()
            self._woken.clear()
            await self._woken.wait()

    def _put(self, batch: list[tuple[bytes, int]]) -> int:
        assert self._client is not None
        digests, rows = [digest for digest, _ in batch], self._checksums[: len(batch)]
        parts = [self._payload[block] for _, block in batch]
        for row, part in zip(rows, parts, strict=True):
            row[:] = np.frombuffer(frame.checksum([part]).to_bytes(8, "little"), np.uint8)
        codes = self._client.put(_keys(digests), [*parts, *rows])
        ours = [digest for i, digest in enumerate(digests) if codes[i] == codes[i + len(digests)] == 0]
        if len(ours) < len(digests):
            raise PDError(f"{len(digests) - len(ours)} of {len(digests)} blocks were not taken: code {min(codes)}")
        return len(ours)

    # ---- Fetching --------

    async def contains(self, digests: Sequence[bytes]) -> int:
        """Return how many leading blocks of a chain are in the store; 0 if it does not answer."""
        client = self._client
        if client is None or not self.is_well or not digests:
            return 0
        return await self._try(client.contains, _keys(digests)[: len(digests)]) or 0

    async def fetch(self, digests: Sequence[bytes], blocks: Sequence[int]) -> int:
        """Read a chain into blocks that nobody else uses, and return how many leading ones are whole."""
        done = 0
        while done < len(digests) and self.is_well:
            part = slice(done, done + BATCH_BLOCKS)
            got = await self._transfer("receive", self._get, digests[part], blocks[part])
            done += got
            if got < len(digests[part]):
                break
        return done

    def _get(self, digests: Sequence[bytes], blocks: Sequence[int]) -> int:
        assert self._client is not None
        rows, parts = self._checksums[: len(blocks)], [self._payload[block] for block in blocks]
        found = self._client.get(_keys(digests), [*parts, *rows])
        for i, part in enumerate(parts):
            is_whole = found[i] and found[i + len(parts)]
            if not is_whole or frame.checksum([part]) != int.from_bytes(rows[i].tobytes(), "little"):
                return i
        return len(parts)

    # ---- The thread --------

    async def _transfer(self, direction: Direction, action: Callable[..., int], *arguments: object) -> int:
        """Have blocks written or read, count that, and return how many were."""
        began_s = self._clock()
        count = await self._try(action, *arguments)
        if count is None:
            self._transfers.failed(direction, "store", "none")
        elif count:
            num_bytes = count * self._payload.shape[1]
            self._transfers.stored(direction, "store", "none", num_bytes, self._clock() - began_s)
        return count or 0

    async def _try(self, action: Callable[..., T], *arguments: object) -> T | None:
        """Do something in the thread; after a failure the store is left alone for a while."""
        try:
            return await self._in_thread(action, *arguments)
        except (PDError, RuntimeError, OSError) as error:
            self.rest(str(error))
            return None

    async def _in_thread(self, action: Callable[..., T], *arguments: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, action, *arguments)


def _keys(digests: Sequence[bytes]) -> list[str]:
    names = [f"pdactors/{digest.hex()}" for digest in digests]
    return [*names, *(f"{name}/xxh3" for name in names)]

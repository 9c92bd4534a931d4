"""`Client`: the same as `AsyncClient` for programs without asyncio."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import threading
from collections.abc import AsyncGenerator, Coroutine, Generator
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any, Self, TypeVar, cast

from pdactors.client.client import AsyncClient, Generation, Messages
from pdactors.client_messages import DoneEvent, TokenEvent
from pdactors.errors import ConnectionLost, PDError
from pdactors.messages import Role

END_S = 1.0
T = TypeVar("T")


class Client:
    """The same for programs without asyncio; its loop runs in a thread of its own, so it may be shared by threads."""

    def __init__(self, address: str, *, token: str = "", key: str | Path = "", connect_timeout_s: float = 10.0) -> None:
        """Connect; raises what `AsyncClient.connect` raises."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="pdactors-client", daemon=True)
        self._thread.start()
        self._client = AsyncClient(address, token=token, key=key, connect_timeout_s=connect_timeout_s)
        self._is_closed = False
        self._ending: set[asyncio.Task[None]] = set()  # streams that nobody waits for
        self._submitting = threading.Lock()  # so that nothing is given to a loop that has ended
        atexit.register(self.close)  # a stream that is left open at exit must not wait for a loop that is gone
        try:
            self._wait(self._client.connect())
        except BaseException:
            self.close()
            raise

    def stream(
        self, prompt: str | None = None, *, messages: Messages | None = None, **options: Any
    ) -> Generator[TokenEvent, None, None]:
        """Yield each token as it is generated; see `AsyncClient.stream`."""
        return self._iterate(self._client.stream(prompt, messages=messages, **options))

    def events(
        self, prompt: str | None = None, *, messages: Messages | None = None, **options: Any
    ) -> Generator[TokenEvent | DoneEvent, None, None]:
        """Yield the tokens and, last, the end with usage and timing."""
        return self._iterate(self._client.events(prompt, messages=messages, **options))

    def generate(self, prompt: str | None = None, *, messages: Messages | None = None, **options: Any) -> Generation:
        """Return the complete answer; see `AsyncClient.stream`."""
        return self._wait(self._client.generate(prompt, messages=messages, **options))

    def status(self) -> dict[str, Any]:
        """Return what `pdactors status --json` prints."""
        return self._wait(self._client.status())

    def leaks(self) -> dict[str, Any]:
        """Return what is held in the cluster for nobody."""
        return self._wait(self._client.leaks())

    def requests(self) -> list[dict[str, Any]]:
        """Describe the last requests; see `AsyncClient.requests`."""
        return self._wait(self._client.requests())

    def trace(self, request: str = "") -> dict[str, Any]:
        """Return a request's timeline; see `AsyncClient.trace`."""
        return self._wait(self._client.trace(request))

    def drain(self, actor: str) -> dict[str, Any]:
        """Have an engine drained; see `AsyncClient.drain`."""
        return self._wait(self._client.drain(actor))

    def scale(self, node: str, role: Role, count: int) -> dict[str, Any]:
        """Have engines started or drained; see `AsyncClient.scale`."""
        return self._wait(self._client.scale(node, role, count))

    def close(self) -> None:
        """Cancel what is under way and disconnect; idempotent."""
        if self._is_closed:
            return
        atexit.unregister(self.close)
        try:
            self._wait(self._client.close())
        finally:
            with self._submitting:
                self._is_closed = True
        asyncio.run_coroutine_threadsafe(_end_tasks(), self._loop).result()  # those of threads that came just before
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _iterate(self, events: AsyncGenerator[T, None]) -> Generator[T, None, None]:
        async def following() -> T:
            return await anext(events)

        try:
            while True:
                try:
                    yield self._wait(following())
                except StopAsyncIteration:
                    return
        finally:
            if self._thread is threading.current_thread():  # it was garbage, and collected there: nobody waits
                self._end_soon(events)
            elif not self._is_closed:
                self._wait(events.aclose())

    def _end_soon(self, events: AsyncGenerator[T, None]) -> None:
        async def closing() -> None:
            with contextlib.suppress(PDError):
                await events.aclose()

        task = self._loop.create_task(closing())
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    def _wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop's thread; an interrupted wait cancels it."""
        if self._thread is threading.current_thread():
            coroutine.close()
            raise RuntimeError("a Client cannot be used from its own callbacks")
        with self._submitting:
            if self._is_closed:
                coroutine.close()
                raise ConnectionLost("the client is closed")
            future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except CancelledError:
            raise ConnectionLost("the client was closed") from None
        except BaseException:
            future.cancel()
            raise


async def _end_tasks() -> None:
    """Let what still runs on this loop end; it was told that the client is closed."""
    tasks = asyncio.all_tasks() - {cast(asyncio.Task[Any], asyncio.current_task())}
    if tasks:
        _, left = await asyncio.wait(tasks, timeout=END_S)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

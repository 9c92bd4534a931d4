"""`NodeHost`: one node of the cluster file, in a process that Ray placed.

It holds the node's arena, and its supervisor starts and minds the node's actors as in any launch; they end with it.
What comes and goes through Ray is texts, numbers and JSON.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import msgspec
from msgspec import Struct

from pdactors.actors import launch as share
from pdactors.actors.discovery import Ready
from pdactors.config.address import Address
from pdactors.config.cluster import ClusterConfig
from pdactors.config.logging import configure, get_logger
from pdactors.engine.store import resolve
from pdactors.errors import PDError


class Plan(Struct, frozen=True):
    """What a host is to run: a node of a file that has the addresses which Ray's placement gave."""

    config: ClusterConfig
    node: str
    run_id: str


class Ending(Struct, frozen=True):
    """Why a node ended: an error's code and text; or none, since it was asked to, or the run is over."""

    code: str = ""
    message: str = ""


class NodeHost:
    """Its worker's loop stays free for calls: the launch has a thread, and a loop, of its own."""

    def __init__(self, home: str) -> None:
        """Take `home` for $PDACTORS_HOME, unless it is ""."""
        if home:
            os.environ["PDACTORS_HOME"] = home
        configure()
        self._opened = ExitStack()  # the router's socket, where the router is here
        self._control: socket.socket | None = None
        self._folder = Path()  # of the model
        self._running: asyncio.Task[Ending] | None = None
        self._lifeline = -1  # the launch ends when this is closed

    async def listen(self, ip: str, port: int) -> tuple[int, str]:
        """Listen for actors at this machine's address `ip`; return the port, a free one for 0, or 0 and what failed."""
        try:
            self._control = self._opened.enter_context(share.bound("router.control", f"tcp://{Address(ip, port)}"))
        except PDError as error:
            return 0, error.message
        return int(self._control.getsockname()[1]), ""

    async def fetch(self, model: str) -> bytes:
        """Have the model that `[model] path` names on this machine; return an `Ending`: why it cannot be had, if so."""
        try:
            self._folder = await asyncio.to_thread(resolve, model, fetch=True)
        except PDError as error:
            return msgspec.json.encode(Ending(error.code, error.message))
        return msgspec.json.encode(Ending())

    async def start(self, plan: bytes) -> bytes:
        """Start the node of a `Plan`; return its `Ready` once it is, or nothing when it has ended before."""
        loop = asyncio.get_running_loop()
        started: asyncio.Future[bytes] = loop.create_future()

        def tell(data: bytes) -> None:
            if not started.done():
                started.set_result(data)

        def on_ready(ready: Ready) -> None:  # in the launch's thread
            loop.call_soon_threadsafe(tell, msgspec.json.encode(ready))

        self._running = asyncio.create_task(self._run(msgspec.json.decode(plan, type=Plan), on_ready))
        self._running.add_done_callback(lambda _: tell(b""))
        return await started

    async def ended(self) -> bytes:
        """Return the `Ending` of what was started, when it is over."""
        assert self._running is not None
        return msgspec.json.encode(await self._running)

    async def stop(self) -> None:
        """Have it end, in order."""
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1

    async def _run(self, plan: Plan, on_ready: Callable[[Ready], None]) -> Ending:
        log = get_logger(node=plan.node)
        read_end, self._lifeline = os.pipe()
        try:
            await asyncio.to_thread(
                share.launch,
                plan.config,
                self._folder,
                node=plan.node,
                run_id=plan.run_id,
                control=self._control,
                on_ready=on_ready,
                lifeline=read_end,
            )
        except PDError as error:
            return Ending(error.code, error.message)
        except Exception as error:
            log.exception("node ends")
            return Ending(PDError.code, repr(error))
        finally:
            await self.stop()
            os.close(read_end)
            self._opened.close()
            self._control = None
        return Ending()

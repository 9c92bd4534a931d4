"""`Placed`: a cluster whose nodes somebody else puts on machines. It starts them together, starts again what is lost
wherever it is put then, and ends them in order.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import msgspec

from pdactors.actors.discovery import Ready, announce
from pdactors.actors.ready_file import kept_ready_file
from pdactors.config.address import Address, parse_address
from pdactors.config.cluster import ClusterConfig, ListenSection
from pdactors.config.keys import client_key
from pdactors.config.logging import get_logger
from pdactors.errors import ConfigError, PDError, error_for
from pdactors.launchers.node_host import Ending, Plan

FIRST_PAUSE_S, MAX_PAUSE_S = 0.5, 10.0  # before a node is tried again
END_S = 10.0  # beyond cluster.drain_s, for a node that ends in order


class Hosts(Protocol):
    """Whoever puts a `NodeHost` on a machine for each node, and puts lost ones somewhere anew."""

    async def place(self) -> None:
        """Have a host for every node; raises ConfigError if there is no place for one."""

    async def call(self, node: str, method: str, *arguments: Any) -> Any:
        """Call a method of a node's host; raises ConnectionLost while there is none."""

    def close(self) -> None:
        """End all hosts at once."""


class Placed:
    """A run of `config` on `hosts`; hosts and control port of the file are replaced by where things really are."""

    def __init__(
        self, config: ClusterConfig, hosts: Hosts, ready_file: Path | None, on_ready: Callable[[Ready], None]
    ) -> None:
        self._config = config
        self._hosts = hosts
        self._ready_file = ready_file
        self._on_ready = on_ready
        self._run_id = secrets.token_hex(4)
        self._names = [node.name for node in config.node]
        self._addresses: dict[str, str] = {}
        self._control: Address | None = None
        self._readies: dict[str, Ready] = {}  # of the nodes that run
        self._keeping: dict[str, asyncio.Task[None]] = {}
        self._all_found = asyncio.Event()
        self._all_ready = asyncio.Event()
        self._stopping = asyncio.Event()
        self._log = get_logger(run_id=self._run_id)

    async def run(self) -> None:
        """Live until `stop()`.

        Raises:
            PDError: a node has no place, or could not start.
        """
        serving = asyncio.create_task(self._serve())
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                serving.result()
            elif self._all_ready.is_set():
                await self._end()
        finally:
            await _cancel([serving, stopping])
            self._hosts.close()

    def stop(self) -> None:
        """End the run: give requests that run `cluster.drain_s`."""
        self._stopping.set()

    async def _serve(self) -> None:
        await self._hosts.place()
        self._keeping = {name: asyncio.create_task(self._keep(name)) for name in self._names}
        tasks = [asyncio.create_task(self._announce()), *self._keeping.values()]
        try:
            await asyncio.gather(*tasks)
        finally:
            await _cancel(tasks)

    # ---- One node --------

    async def _keep(self, name: str) -> None:
        """Run a node, and again when it is lost; what fails before the cluster was ready is an error."""
        pause_s = FIRST_PAUSE_S
        while not self._stopping.is_set():
            try:
                await self._find(name)
                await self._all_found.wait()
                await self._run(name)
            except PDError as error:
                if not self._all_ready.is_set():
                    raise
                ran = self._readies.pop(name, None)
                pause_s = FIRST_PAUSE_S if ran else pause_s
                event = "node lost" if ran else "node not started again"
                self._log.error(event, node=name, code=error.code, reason=error.message)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, MAX_PAUSE_S)

    async def _find(self, name: str) -> None:
        """Learn where a node was put, and have it get the model; where the router is, have that listen."""
        address = await self._hosts.call(name, "where")
        _raise(await self._hosts.call(name, "fetch", self._config.model.path))
        if name == self._config.router.node:
            await self._listen(address)
        self._addresses[name] = address
        if len(self._addresses) == len(self._names):
            self._all_found.set()

    async def _listen(self, address: str) -> None:
        """Give the router the port it had; where that is taken, at the next try the file's. All nodes must know."""
        router = self._config.router
        port = self._control.port if self._control else parse_address(router.control).port
        port, failure = await self._hosts.call(router.node, "listen", address, port)
        if failure:
            self._control = None
            raise ConfigError(failure)
        former, self._control = self._control, Address(address, port)
        if self._all_ready.is_set() and former != self._control:
            self._log.warning("router moved", control=str(self._control))
            await self._tell_to_stop(name for name in self._readies if name != router.node)  # and `_keep` goes on

    async def _run(self, name: str) -> None:
        """Start a node and wait for its end; raises PDError with what it failed by, or if its host is lost."""
        if started := await self._hosts.call(name, "start", msgspec.json.encode(self._plan(name))):
            ready = self._readies[name] = msgspec.json.decode(started, type=Ready)
            if name == self._config.router.node:  # clients are to find the next one there, too
                listen = ListenSection(tcp=ready.tcp, zmq=ready.zmq, http=ready.http)
                self._config = msgspec.structs.replace(self._config, listen=listen)
            self._log.info("node ready", node=name, host=self._addresses[name])
            if len(self._readies) == len(self._names):
                self._all_ready.set()
        _raise(await self._hosts.call(name, "ended"))
        self._readies.pop(name, None)

    def _plan(self, name: str) -> Plan:
        """Return what a node is to run, by what is known now."""
        config = self._config
        nodes = tuple(msgspec.structs.replace(node, host=self._addresses[node.name]) for node in config.node)
        router = msgspec.structs.replace(config.router, control=f"tcp://{self._control}")
        return Plan(msgspec.structs.replace(config, node=nodes, router=router), name, self._run_id)

    # ---- All of them --------

    async def _announce(self) -> None:
        """Once all nodes are ready, say so, and tell everyone who asks here."""
        await self._all_ready.wait()
        with ExitStack() as opened:
            async with await announce(f"{self._run_id}/launcher", self._ready):
                if self._ready_file is not None:
                    opened.enter_context(kept_ready_file(self._ready_file, self._ready()))
                self._on_ready(self._ready())
                await asyncio.Event().wait()

    def _ready(self) -> Ready:
        listen = self._config.listen
        actors = tuple(actor for ready in self._readies.values() for actor in ready.actors)
        return Ready(
            self._run_id,
            os.getpid(),
            tcp=self._reachable(listen.tcp),
            zmq=self._reachable(listen.zmq),
            http=self._reachable(listen.http),
            actors=actors,
            key=client_key(self._config.security),
        )

    def _reachable(self, text: str) -> str:
        """Return an address of the gateway as clients use it: of all addresses that of its machine."""
        if not text or not parse_address(text).is_wildcard:
            return text
        scheme = "tcp://" if text.startswith("tcp://") else ""
        return f"{scheme}{Address(self._addresses[self._config.router.node], parse_address(text).port)}"

    async def _end(self) -> None:
        """Stop the router's node first, which drains; the others go on until then."""
        router = self._config.router.node
        others = [name for name in self._readies if name != router]
        try:
            async with asyncio.timeout(self._config.cluster.drain_s + END_S):
                if router in self._readies:
                    await self._tell_to_stop([router])
                    await self._keeping[router]
                await self._tell_to_stop(others)
                await asyncio.gather(*(self._keeping[name] for name in others))
        except TimeoutError:
            self._log.warning("nodes did not end in time", nodes=sorted(self._readies))

    async def _tell_to_stop(self, names: Iterable[str]) -> None:
        await asyncio.gather(*(self._hosts.call(name, "stop") for name in names), return_exceptions=True)


def _raise(ending: bytes) -> None:
    """Raise the error that an `Ending` is, if it is one."""
    found = msgspec.json.decode(ending, type=Ending)
    if found.code:
        raise error_for(found.code, found.message)


async def _cancel(tasks: Iterable[asyncio.Task[Any]]) -> None:
    for task in (tasks := list(tasks)):
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)

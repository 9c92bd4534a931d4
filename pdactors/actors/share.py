"""`Share`: the nodes of a run that this process starts; they have one nursery, are ready together and end in order."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence

from pdactors.actors.discovery import Ready, announce
from pdactors.actors.process import Nursery
from pdactors.actors.supervisor import Supervisor
from pdactors.errors import PDError


class Share:
    """One supervisor for each node; the router's comes first, where the router runs here.

    The end of any of them is the end of all: of the router's first, so that the others go on until requests are over.
    """

    def __init__(
        self,
        supervisors: Sequence[Supervisor],
        nursery: Nursery,
        addresses: dict[str, str],
        tell_ready: Callable[[Ready], None],
    ) -> None:
        self._supervisors = list(supervisors)
        self._nursery = nursery
        self._addresses = addresses
        self._tell_ready = tell_ready
        self._ended: set[Supervisor] = set()
        self._error: PDError | None = None

    async def run(self) -> None:
        """Live until `stop()`, or until a node fails or the run ends elsewhere.

        Raises:
            PDError: what ended it, if it was not asked to.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                announcing = tasks.create_task(self._announce())
                async with asyncio.TaskGroup() as nodes:
                    for supervisor in self._supervisors:
                        nodes.create_task(self._live(supervisor))
                announcing.cancel()
        finally:
            await self._nursery.close()
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """End the run, if the router is here, or leave it: give requests that run `cluster.drain_s`."""
        first = self._supervisors[0]
        for supervisor in [first] if first.hosts_router and first not in self._ended else self._supervisors:
            supervisor.stop()

    async def _live(self, supervisor: Supervisor) -> None:
        try:
            await supervisor.run()
        except PDError as error:
            self._error = self._error or error
        self._ended.add(supervisor)
        if supervisor.hosts_router:
            for other in self._supervisors:
                other.abandon()
        else:
            self.stop()

    async def _announce(self) -> None:
        """Once all nodes are ready, say so, and tell everyone who asks."""
        for supervisor in self._supervisors:
            await supervisor.is_ready.wait()
        first = self._supervisors[0].spec
        async with await announce(f"{first.run_id}/{first.node}", self._ready):
            self._tell_ready(self._ready())
            await asyncio.Event().wait()

    def _ready(self) -> Ready:
        actors = tuple(actor for supervisor in self._supervisors for actor in supervisor.actors())
        return Ready(self._supervisors[0].spec.run_id, os.getpid(), actors=actors, **self._addresses)

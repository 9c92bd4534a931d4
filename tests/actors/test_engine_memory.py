"""An engine's memory while its migrator dies and a successor starts: a real engine actor, no model behind it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from pdactors.actors.migrator import Migrator
from pdactors.actors.worker import WorkerActor
from pdactors.kv.arena import Arena
from pdactors.transport.inproc import InprocTransport

NUM_BLOCKS, EXTENT_BLOCKS = 64, 2
MODEL = SimpleNamespace(
    bind=lambda *_: None,
    description="none",
    shape=SimpleNamespace(weight_bytes_as=lambda _: 1),
    dtype="float32",
    machine=None,
)


READS_AFTER_S = 0.02


class Eager(WorkerActor):
    """Asks for memory as soon as there is somebody to ask."""

    def _introduce(self, name):
        super()._introduce(name)
        if name == self.migrator:
            self.extents.mind(3 * EXTENT_BLOCKS, 0, self.clock())


class Slow(Migrator):
    """Reads what it is told in one go, after a while: it has only just started."""

    def _on_listener(self, peer, frames):
        asyncio.get_running_loop().call_later(READS_AFTER_S, super()._on_listener, peer, frames)


@pytest.fixture
def actors_of(make_spec):
    """Make a worker and migrators of one node, which share its memory."""
    layout = make_spec("worker").layout
    with Arena.create(
        layout, NUM_BLOCKS, extent_blocks=EXTENT_BLOCKS, num_slots=2, leases_per_slot=2, max_lease_blocks=8
    ) as arena:

        def make(role, incarnation=1):
            slot = 0 if role == "worker" else 1
            terms = {"mode": "colocated", "transport": "lease", "slot": slot, "incarnation": incarnation}
            spec = make_spec(role, f"n0/{role}", arena=arena.fileno(), **terms)
            if role == "worker":
                return Eager(spec, InprocTransport(), MODEL)
            return Slow(spec, InprocTransport())

        make.arena = arena
        yield make


async def test_what_a_successor_grants_is_not_taken_for_what_its_predecessor_granted(
    actors_of, cluster_of, living, until
):
    worker = actors_of("worker")

    def num_owned() -> int:
        """Return how many extents the worker has; raise unless the table says so too."""
        worker.extents.check()
        assert len(worker.pool.extents) == len(actors_of.arena.extents_of(0))
        return len(worker.pool.extents)

    def asked() -> bool:
        worker.extents.mind(2 * EXTENT_BLOCKS, 0, worker.clock())
        return len(worker.pool.extents) > before

    async with cluster_of("gateway", mode="colocated") as cluster, living(worker):
        async with living(actors_of("migrator")):
            await until(lambda: worker.state == "ready")
        before = num_owned()
        async with living(actors_of("migrator", 2)):
            await until(lambda: cluster.router.members["n0/migrator"].incarnation == 2)
            await until(asked)
            await asyncio.sleep(0.1)  # whatever is on its way arrives
            assert num_owned() > before

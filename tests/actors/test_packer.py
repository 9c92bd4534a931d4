"""The packer of a prefill, on a real arena and with real books, beside a model that says what is attended to."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from pdactors.actors.packer import ROOM_S, Packer
from pdactors.config.logging import get_logger
from pdactors.engine.pruner import WINDOW
from pdactors.errors import InvariantError
from pdactors.kv.arena import Arena
from pdactors.kv.blocks import BlockPool
from pdactors.kv.layout import KVLayout
from pdactors.kv.leases import GRACE_S
from pdactors.kv.loans import Loans
from pdactors.messages import KVHandle, Lease, Migrate, Segment

LAYOUT = KVLayout(2, 2, 8, 8, "float32")
NAME, MIGRATOR = "n0/prefill-0", "n0/migrator"
PROMPT = list(range(100))  # 13 blocks; half of it takes 7, and 5 to work in
NEEDED = 12


class Prefill:
    """What the packer needs of its actor, and what it asks of it."""

    def __init__(self, spec, arena, num_blocks):
        self.spec, self.arena, self.migrator = spec, arena, MIGRATOR
        self.pool = BlockPool()
        self.pool.add_extent(range(num_blocks))
        self.loans = Loans(self.pool, arena.leases(), 0, 1, 30.0)
        self.engine = self
        self.model = self
        self.log = get_logger()
        self.now = 0.0
        self.told = []
        self.dropped = []
        self.fault = None

    @property
    def num_unreserved(self):
        return self.pool.num_available

    def clock(self):
        return self.now

    def tell(self, name, message):
        self.told.append((name, message))
        return True

    def drop(self, why, **_):
        self.dropped.append(why)

    async def in_thread(self, action, *arguments):
        return action(*arguments)

    def observe(self, batch):
        if self.fault is not None:
            raise self.fault
        assert list(batch.input_ids) == PROMPT[-WINDOW:]
        return np.random.default_rng(1).random((2, 2, len(PROMPT)))


@pytest.fixture
def make(make_spec):
    with Arena.create(LAYOUT, 64, extent_blocks=64, num_slots=2, leases_per_slot=2, max_lease_blocks=16) as arena:

        def make(num_blocks=64, prompt=PROMPT):
            spec = make_spec("prefill", NAME, slot=0)
            config = msgspec.structs.replace(spec.config, kv=msgspec.structs.replace(spec.config.kv, prune=0.5))
            actor = Prefill(msgspec.structs.replace(spec, config=config), arena, num_blocks)
            blocks = actor.pool.allocate(LAYOUT.num_blocks(len(prompt)))
            arena.payload()[:] = 7
            lease = actor.loans.lend(("r", 1), blocks, 0.0)
            actor.pool.free(blocks)
            segment = Segment(NAME, lease, 0, tuple(blocks))
            handle = KVHandle("n0", NAME, LAYOUT.fingerprint, (segment,), len(prompt))
            packer = Packer(actor)
            packer.remember(("r", 1), handle, prompt)
            return actor, packer, Migrate("r", 1, handle, "n1/migrator", (b"digest",), time_left_s=9.0)

        yield make


def holds_nothing(actor):
    for now in (0.0, 2 * GRACE_S):
        actor.loans.sweep(now)
    actor.loans.check()
    actor.pool.check()
    return actor.pool.account()


async def test_what_is_packed_takes_the_place_of_the_whole(make):
    actor, packer, message = make()
    packer.asked(message)
    assert packer.requests == ("r",)
    actor.now = 0.25
    assert await packer.work()
    ((to, passed),) = actor.told
    assert (to, passed.target, passed.digests, passed.time_left_s) == (MIGRATOR, "n1/migrator", (), 8.75)
    (segment,) = passed.handle.segments
    assert (passed.handle.num_tokens, passed.handle.num_pruned, len(segment.blocks)) == (50, 50, 7)
    assert packer.requests == ()
    assert not await packer.work()
    account = holds_nothing(actor)  # of the whole nothing is lent any more, though nobody had accepted it
    assert (account.leased_out, account.used, account.free) == (7, 0, 57)
    assert actor.loans.is_lent(("r", 1), segment.lease)


async def test_a_prompt_that_saves_no_block_moves_whole(make):
    actor, packer, message = make(prompt=PROMPT[:7])
    packer.asked(message)
    assert actor.told == [(MIGRATOR, message)]


async def test_without_room_it_waits_a_while_and_moves_whole(make):
    actor, packer, message = make(num_blocks=13 + NEEDED - 1)
    packer.asked(message)
    assert packer.blocks_lacking == 1
    actor.now = ROOM_S / 2
    assert not await packer.work()
    actor.now = 2 * ROOM_S
    assert await packer.work()
    ((_, passed),) = actor.told
    assert (passed.handle, passed.digests) == (message.handle, message.digests)
    assert holds_nothing(actor).leased_out == 13


async def test_it_is_packed_as_soon_as_there_is_room(make):
    actor, packer, message = make(num_blocks=13 + NEEDED)
    taken = actor.pool.allocate(1)
    packer.asked(message)
    assert not await packer.work()
    actor.pool.free(taken)
    assert await packer.work()
    assert actor.told[0][1].handle.num_pruned == 50


@pytest.mark.parametrize("lost", [True, False])
async def test_what_fails_moves_whole(make, lost):
    actor, packer, message = make()
    packer.asked(message)
    if lost:
        actor.loans.revoke(("r", 1))
        assert holds_nothing(actor).leased_out == 0
    else:
        actor.fault = RuntimeError("no such thing")
    assert await packer.work()
    assert [passed.handle for _, passed in actor.told] == [message.handle]
    assert holds_nothing(actor).used == 0


async def test_a_model_that_is_used_wrongly_ends_the_actor(make):
    actor, packer, message = make()
    packer.asked(message)
    actor.fault = InvariantError("a slot is written twice")
    with pytest.raises(InvariantError):
        await packer.work()


async def test_without_a_lease_record_it_moves_whole(make):
    actor, packer, message = make()
    actor.loans.lend(("other", 1), actor.pool.allocate(1), 0.0)
    packer.asked(message)
    assert await packer.work()
    assert [passed.handle for _, passed in actor.told] == [message.handle]


async def test_the_router_is_not_believed_where_the_blocks_lie(make):
    actor, packer, message = make()
    wrong = Segment(NAME, Lease(5, 5), 0, tuple(range(40, 53)))
    packer.asked(msgspec.structs.replace(message, handle=msgspec.structs.replace(message.handle, segments=(wrong,))))
    assert await packer.work()
    assert actor.told[0][1].handle.num_pruned == 50


async def test_who_is_gone_is_forgotten(make):
    actor, packer, message = make()
    packer.asked(message)
    packer.forget(("r", 1))
    assert not await packer.work()
    packer.asked(message)
    assert (actor.told, actor.dropped) == ([], ["untimely migrate"])


async def test_interactive_prompts_are_packed_first(make):
    _, packer, message = make()
    packer.remember(("s", 1), message.handle, PROMPT)
    packer.asked(msgspec.structs.replace(message, priority="batch"))
    packer.asked(msgspec.structs.replace(message, request="s"))
    assert packer.requests == ("r", "s")
    await packer.work()
    assert packer.requests == ("r",)

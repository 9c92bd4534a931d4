"""The order in which KV goes over a link, under any mixture of migrations, and which way it takes."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pdactors.policy.placement import Place
from pdactors.policy.transfer import MAX_IN_FLIGHT, PATIENCE, TRANSFER_BLOCKS, TransferQueue, Way, choose_way, runs

KINDS = ["interactive", "batch", "background"]
some_kind = st.sampled_from(KINDS)
RANKS = {"interactive": 0, "batch": 1, "background": 2}
some_link = st.sampled_from(["a", "b"])
LINK = "n1/migrator"


def queue_of(*migrations, link=LINK):
    """Return a queue with migrations `(name, kind, deadline, blocks)`."""
    queue = TransferQueue()
    for name, kind, deadline_s, num_blocks in migrations:
        queue.add((name, 1), link, kind, deadline_s)
        queue.extend((name, 1), 0, num_blocks)
    return queue


def drain(queue, limit=10_000, link=LINK):
    """Take transfers one at a time, each stored before the next; return whose they were."""
    names = []
    while (transfer := queue.next(link)) is not None and len(names) < limit:
        queue.ended(transfer, is_stored=True)
        names.append(transfer.key[0])
    return names


# ---- Order --------


def test_higher_classes_go_first_then_earlier_deadlines_then_the_older():
    queue = queue_of(
        ("put", "background", 1.0, 1), ("late", "batch", 9.0, 1), ("none", "batch", None, 1), ("old", "batch", 5.0, 1),
        ("new", "batch", 5.0, 1), ("urgent", "interactive", None, 1), ("first", "interactive", 2.0, 1),
    )  # fmt: skip
    assert drain(queue) == ["first", "urgent", "old", "new", "late", "none", "put"]


def test_a_migration_is_cut_into_transfers_in_order():
    queue = queue_of(("r", "batch", None, 2 * TRANSFER_BLOCKS + 3))
    got = [queue.next(LINK) for _ in range(3)]
    assert [(t.start, t.num_blocks) for t in got] == [(0, TRANSFER_BLOCKS), (16, TRANSFER_BLOCKS), (32, 3)]
    assert len({t.number for t in got}) == 3


def test_no_more_than_a_few_transfers_are_under_way_on_a_link():
    queue = queue_of(("r", "batch", None, 100 * TRANSFER_BLOCKS))
    queue.add(("s", 1), "elsewhere", "batch", None)
    queue.extend(("s", 1), 0, 1)
    got = [queue.next(LINK) for _ in range(MAX_IN_FLIGHT)]
    assert queue.next(LINK) is None
    assert queue.next("elsewhere") is not None
    queue.ended(got[1], is_stored=True)
    assert queue.next(LINK) is not None
    assert queue.next(LINK) is None


def test_what_is_more_urgent_overtakes_at_the_next_transfer_and_shares_only_with_what_had_begun():
    queue = queue_of(("b", "batch", None, 10 * TRANSFER_BLOCKS))
    begun = [queue.next(LINK) for _ in range(MAX_IN_FLIGHT)]
    queue.add(("r", 1), LINK, "interactive", None)
    queue.extend(("r", 1), 0, 5)
    queue.ended(begun[0], is_stored=True)
    urgent = queue.next(LINK)
    assert urgent.key == ("r", 1)
    for transfer in begun[1:]:
        queue.ended(transfer, is_stored=True)
        assert queue.next(LINK) is None
    queue.ended(urgent, is_stored=True)
    assert [queue.next(LINK).key for _ in range(MAX_IN_FLIGHT)] == [("b", 1)] * MAX_IN_FLIGHT


@given(st.integers(1, 4), st.integers(0, 4), st.integers(0, 4))
def test_nobody_starves(num_interactive, num_batch, num_background):
    """Whatever is above it, of each class something goes every `PATIENCE + 1` transfers of higher ones."""
    names = [("interactive", num_interactive), ("batch", num_batch), ("background", num_background)]
    queue = queue_of(*((f"{kind}-{i}", kind, None, 10_000) for kind, count in names for i in range(count)))
    got = [name.partition("-")[0] for name in drain(queue, limit=400)]
    present = [kind for kind, count in names if count]
    for rank, kind in enumerate(present):
        # two lower classes whose turn it is go one after the other
        turn = PATIENCE + len(present) - 2 if rank else 2 * len(present)
        gaps = [len(list(group)) for is_kind, group in itertools.groupby(got, kind.__eq__) if not is_kind]
        assert max(gaps, default=0) <= turn, (kind, got)
    assert got.count("interactive") >= 400 * (PATIENCE - 1) / (PATIENCE + 1)


# ---- Ends, repeats, cancels --------


def test_what_was_not_stored_is_sent_again_before_the_rest():
    queue = queue_of(("r", "batch", None, 3 * TRANSFER_BLOCKS))
    first, second = queue.next(LINK), queue.next(LINK)
    queue.ended(first, is_stored=False)
    again = queue.next(LINK)
    assert (again.start, again.num_blocks) == (first.start, first.num_blocks)
    assert again.number not in (first.number, second.number)


def test_the_same_end_twice_frees_one_place():
    queue = queue_of(("r", "batch", None, 10 * TRANSFER_BLOCKS))
    got = [queue.next(LINK) for _ in range(MAX_IN_FLIGHT)]
    queue.ended(got[0], is_stored=True)
    queue.ended(got[0], is_stored=False)
    assert queue.next(LINK).start == MAX_IN_FLIGHT * TRANSFER_BLOCKS
    assert queue.next(LINK) is None


def test_a_removed_migration_is_sent_no_further_and_frees_the_link():
    queue = queue_of(("r", "interactive", None, 100 * TRANSFER_BLOCKS), ("s", "batch", None, 5))
    got = [queue.next(LINK) for _ in range(MAX_IN_FLIGHT)]
    queue.remove(("r", 1))
    queue.remove(("r", 1))
    assert queue.next(LINK).key == ("s", 1)
    queue.ended(got[0], is_stored=False)
    assert queue.next(LINK) is None
    assert len(queue) == 1


def test_overdue_are_those_whose_deadline_has_passed():
    queue = queue_of(("a", "batch", 3.0, 1), ("b", "batch", None, 1), ("c", "batch", 5.0, 1))
    assert queue.overdue(3.0) == []
    assert queue.overdue(4.0) == [("a", 1)]
    assert queue.overdue(1e9) == [("a", 1), ("c", 1)]


def test_a_deadline_may_be_known_later_than_the_first_part():
    queue = queue_of(("a", "batch", None, 1), ("b", "batch", None, 1), ("c", "batch", 5.0, 1))
    queue.set_deadline(("b", 1), 3.0)
    assert queue.overdue(4.0) == [("b", 1)]
    assert drain(queue) == ["b", "c", "a"]


def test_a_migration_grows_while_it_is_sent_and_is_idle_in_between():
    queue = queue_of(("r", "batch", None, 0))
    assert queue.next(LINK) is None
    queue.extend(("r", 1), 0, 2)
    assert not queue.is_idle(("r", 1))
    transfer = queue.next(LINK)
    assert not queue.is_idle(("r", 1))
    queue.ended(transfer, is_stored=True)
    assert queue.is_idle(("r", 1))
    queue.extend(("r", 1), 2, 5)
    assert queue.next(LINK)[2:] == (2, 3)


class QueueMachine(RuleBasedStateMachine):
    """Every block that is asked for is sent until it is stored, once, and none of what was removed."""

    def __init__(self):
        super().__init__()
        self.queue = TransferQueue()
        self.link: dict = {}
        self.kind: dict = {}
        self.wanted: dict = {}  # key -> blocks that are not stored yet
        self.sizes: dict = {}
        self.under_way: list = []
        self.numbers: set = set()

    @rule(link=some_link, kind=some_kind, deadline_s=st.sampled_from([None, 1.0, 2.0]))
    def add(self, link, kind, deadline_s):
        key = (f"r{len(self.sizes)}", 1)
        self.queue.add(key, link, kind, deadline_s)
        self.link[key], self.wanted[key], self.sizes[key], self.kind[key] = link, set(), 0, kind

    @precondition(lambda self: self.wanted)
    @rule(data=st.data(), count=st.integers(0, 40))
    def extend(self, data, count):
        key = data.draw(st.sampled_from(sorted(self.wanted)))
        start, stop = self.sizes[key], self.sizes[key] + count
        self.queue.extend(key, start, stop)
        self.wanted[key].update(range(start, stop))
        self.sizes[key] = stop

    @rule(link=some_link)
    def take(self, link):
        transfer = self.queue.next(link)
        busy = [t for t in self.under_way if self.link[t.key] == link]
        idle = [k for k, wanted in self.wanted.items() if self.link[k] == link and wanted - self.blocks_under_way(k)]
        if transfer is None:
            ranks = [RANKS[self.kind[t.key]] for t in busy]
            assert len(busy) == MAX_IN_FLIGHT or all(RANKS[self.kind[key]] > min(ranks) for key in idle)
            return
        assert len(busy) < MAX_IN_FLIGHT
        assert transfer.key in idle
        assert transfer.number not in self.numbers
        self.numbers.add(transfer.number)
        blocks = set(range(transfer.start, transfer.start + transfer.num_blocks))
        assert 1 <= len(blocks) <= TRANSFER_BLOCKS
        assert blocks <= self.wanted[transfer.key] - self.blocks_under_way(transfer.key)
        self.under_way.append(transfer)

    def blocks_under_way(self, key):
        return {b for t in self.under_way if t.key == key for b in range(t.start, t.start + t.num_blocks)}

    @precondition(lambda self: self.under_way)
    @rule(data=st.data(), is_stored=st.booleans())
    def end(self, data, is_stored):
        transfer = data.draw(st.sampled_from(self.under_way))
        self.under_way.remove(transfer)
        self.queue.ended(transfer, is_stored=is_stored)
        if is_stored:
            self.wanted[transfer.key].difference_update(range(transfer.start, transfer.start + transfer.num_blocks))

    @precondition(lambda self: self.wanted)
    @rule(data=st.data())
    def remove(self, data):
        key = data.draw(st.sampled_from(sorted(self.wanted)))
        self.queue.remove(key)
        del self.wanted[key]
        self.under_way = [t for t in self.under_way if t.key != key]

    @invariant()
    def it_is_idle_when_nothing_is_wanted(self):
        assert len(self.queue) == len(self.wanted)
        for key, wanted in self.wanted.items():
            assert self.queue.is_idle(key) == (not wanted)


QueueMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
TestQueue = QueueMachine.TestCase


@given(st.lists(st.integers(0, 30), unique=True).map(sorted))
def test_runs_cover_exactly_what_they_were_made_of(indices):
    found = runs(indices)
    assert [i for start, stop in found for i in range(start, stop)] == indices
    assert all(a[1] < b[0] for a, b in itertools.pairwise(found))


# ---- The way --------

CPU, OTHER_NODE, OTHER_RACK = Place("n0", "r0"), Place("n1", "r0"), Place("n2", "r1")
GPU, GPU1, FAR_GPU = Place("n0", "r0", "cuda:0"), Place("n0", "r0", "cuda:1"), Place("n1", "r0", "cuda:0")


@pytest.mark.parametrize(
    ("source", "target", "transport", "offered", "way"),
    [
        (CPU, CPU, "auto", {"ucx"}, Way("lease", "same memory")),
        (CPU, CPU, "lease", set(), Way("lease", "same memory")),
        (CPU, OTHER_NODE, "auto", {"ucx"}, Way("ucx", "lease: other node; cuda_ipc: not two devices of one node")),
        (CPU, OTHER_RACK, "auto", {"ucx"}, Way("ucx", "lease: other rack; cuda_ipc: not two devices of one node")),
        (CPU, OTHER_NODE, "auto", set(), None),
        (CPU, OTHER_NODE, "lease", {"ucx", "cuda_ipc"}, None),
        (CPU, CPU, "ucx", {"ucx"}, Way("ucx", "lease: kv.transport says otherwise; cuda_ipc: kv.transport is ucx")),
        (CPU, CPU, "ucx", set(), None),
        (GPU, GPU1, "auto", {"ucx", "cuda_ipc"}, Way("cuda_ipc", "lease: other device")),
        (GPU, GPU1, "auto", {"ucx"}, Way("ucx", "lease: other device; cuda_ipc: not offered by both ends")),
        (GPU, GPU1, "ucx", {"ucx", "cuda_ipc"}, Way("ucx", "lease: other device; cuda_ipc: kv.transport is ucx")),
        (CPU, GPU, "cuda_ipc", {"cuda_ipc", "ucx"}, None),
        (GPU, FAR_GPU, "auto", {"ucx"}, Way("ucx", "lease: other node; cuda_ipc: not two devices of one node")),
    ],
)  # fmt: skip
def test_kv_takes_the_fastest_way_that_both_ends_have_and_says_why_no_faster_one(
    source, target, transport, offered, way
):
    assert choose_way(source, target, transport, offered) == way

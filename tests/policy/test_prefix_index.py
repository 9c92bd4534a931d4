"""The prefix index against a model that keeps every fact in one set."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pdactors.policy.prefix_index import PrefixIndex, Share

OWNERS = ["a", "b", "c", "d"]
CHAINS = [[bytes([chain, i]) for i in range(6)] for chain in range(3)]
DIGESTS = [digest for chain in CHAINS for digest in chain]

some_owner = st.sampled_from(OWNERS)
some_owners = st.frozensets(some_owner)
some_chain = st.sampled_from(CHAINS)
some_digests = st.lists(st.sampled_from(DIGESTS), max_size=8)


def index_of(**held: list[bytes]) -> PrefixIndex:
    index = PrefixIndex()
    for owner, digests in held.items():
        index.add(owner, digests)
    return index


class IndexMachine(RuleBasedStateMachine):
    """`facts` are all pairs (owner, digest) that hold."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex()
        self.facts: set[tuple[str, bytes]] = set()

    @rule(owner=some_owner, digests=some_digests)
    def add(self, owner, digests):
        self.index.add(owner, digests)
        self.facts |= {(owner, digest) for digest in digests}

    @rule(owner=some_owner, chain=some_chain, count=st.integers(1, 6))
    def add_a_prefix(self, owner, chain, count):
        self.add(owner, chain[:count])

    @rule(owner=st.sampled_from([*OWNERS, "stranger"]), digests=some_digests)
    def remove(self, owner, digests):
        self.index.remove(owner, digests)
        self.facts -= {(owner, digest) for digest in digests}

    @rule(owner=st.sampled_from([*OWNERS, "stranger"]))
    def forget(self, owner):
        self.index.forget(owner)
        self.facts = {(other, digest) for other, digest in self.facts if other != owner}

    def holds(self, owner, digest) -> bool:
        return (owner, digest) in self.facts

    @rule(chain=some_chain, owners=some_owners, extra=st.lists(st.frozensets(st.sampled_from(DIGESTS)), max_size=3))
    def num_known_is_the_longest_beginning_that_is_held(self, chain, owners, extra):
        held = [
            any(digest in coming for coming in extra) or any(self.holds(owner, digest) for owner in owners)
            for digest in chain
        ]
        known = [*held, False].index(False)
        assert self.index.num_known(chain, owners, extra) == known
        assert self.index.num_known(chain[:2], owners, extra) == min(2, known)

    @rule(chain=some_chain, reader=some_owner, owners=some_owners)
    def shares_are_what_the_reader_lacks_of_the_known_part(self, chain, reader, owners):
        shares = self.index.shares(chain, reader, owners)
        known = self.index.num_known(chain, {reader, *owners})
        asked = {share.start + i: digest for share in shares for i, digest in enumerate(share.digests)}
        assert asked == {i: chain[i] for i in range(known) if not self.holds(reader, chain[i])}
        assert sum(len(share.digests) for share in shares) == len(asked), "a block is asked for twice"
        for share in shares:
            assert share.digests
            assert share.owner in owners
            assert share.owner != reader
            assert all(self.holds(share.owner, digest) for digest in share.digests)
        assert [share.start for share in shares] == sorted(share.start for share in shares)

    @rule(chain=some_chain, reader=some_owner, owners=some_owners)
    def neighbours_of_one_owner_are_one_share(self, chain, reader, owners):
        shares = self.index.shares(chain, reader, owners)
        for before, after in pairwise(shares):
            is_next = before.start + len(before.digests) == after.start
            assert not (is_next and self.holds(before.owner, after.digests[0]))

    @invariant()
    def nothing_is_kept_that_nobody_has(self):
        owners = {digest: set() for _, digest in self.facts}
        for owner, digest in self.facts:
            owners[digest].add(owner)
        assert self.index._owners == owners
        assert {(owner, d) for owner, digests in self.index._digests.items() for d in digests} == self.facts


IndexMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPrefixIndex = IndexMachine.TestCase

# ---- By example --------

CHAIN = CHAINS[0]


def test_an_empty_index_knows_nothing():
    assert PrefixIndex().num_known(CHAIN, OWNERS) == 0
    assert PrefixIndex().shares(CHAIN, "a", OWNERS) == []
    assert index_of(a=CHAIN).num_known([], OWNERS) == 0


def test_a_gap_ends_what_is_known():
    index = index_of(a=[*CHAIN[:2], *CHAIN[3:]])
    assert index.num_known(CHAIN, ["a"]) == 2
    assert index.num_known(CHAIN, ["a"], extra=[{CHAIN[2]}]) == 6


def test_several_owners_hold_a_chain_together():
    index = index_of(a=CHAIN[:2], b=CHAIN[2:4], c=CHAIN[4:])
    assert index.num_known(CHAIN, ["a", "b"]) == 4
    assert index.shares(CHAIN, "b", ["a", "c"]) == [
        Share("a", 0, tuple(CHAIN[:2])),
        Share("c", 4, tuple(CHAIN[4:])),
    ]


def test_a_share_goes_on_with_its_owner_although_others_have_the_block_too():
    index = index_of(b=CHAIN[:3], a=CHAIN[1:])
    assert index.shares(CHAIN, "r", ["a", "b"]) == [Share("b", 0, tuple(CHAIN[:3])), Share("a", 3, tuple(CHAIN[3:]))]


def test_an_owner_out_of_reach_is_not_asked():
    index = index_of(a=CHAIN, b=CHAIN[:1])
    assert index.shares(CHAIN, "r", ["b"]) == [Share("b", 0, tuple(CHAIN[:1]))]


def test_what_the_reader_has_between_is_left_out():
    index = index_of(a=CHAIN[:4], r=CHAIN[1:3])
    assert index.shares(CHAIN, "r", ["a"]) == [Share("a", 0, (CHAIN[0],)), Share("a", 3, (CHAIN[3],))]


@given(some_digests)
def test_what_was_added_and_forgotten_leaves_nothing(digests):
    index = index_of(a=digests)
    index.forget("a")
    assert (index._owners, index._digests) == ({}, {})

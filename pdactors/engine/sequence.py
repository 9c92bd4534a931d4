"""`Sequence`: the engine's side of a request, its tokens and its block table. Tables and counts only, no tensors."""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from pdactors.messages import Decode, KVHandle, Lease, Path, Prefill, Sampling, Segment


@dataclass(slots=True, eq=False)
class Sequence:
    """One request's attempt on one engine.

    `blocks` is the table in token order; KV of the first `num_stored` tokens is stored in it, what follows is still to
    be computed. Blocks of others are in `borrowed` and are only read. What the table may use, but need not, is in
    `lent` (block index -> full block of another owner) and `kept` (block index -> our own, with a reference);
    `tail_block` is another owner's partly filled block, which is copied; its tokens end at `num_lent`.
    """

    request: str
    attempt: int
    prompt: abc.Sequence[int]
    sampling: Sampling
    is_urgent: bool = True
    saves_kv: bool = True  # generated KV stays in the prefix cache
    handle: KVHandle | None = None  # where the prefill left it
    path: Path = "none"  # how it came there
    path_reason: str = ""
    tokens: list[int] = field(default_factory=list)  # generated, the first by the prefill
    num_given: int = 0  # of the tokens: those that it came with
    blocks: list[int] = field(default_factory=list)
    borrowed: set[int] = field(default_factory=set)
    lent: dict[int, int] = field(default_factory=dict)
    tail_block: int | None = None
    num_lent: int = 0
    kept: dict[int, int] = field(default_factory=dict)
    segments: list[Segment] = field(default_factory=list)  # whose leases stand behind `lent` and `tail_block`
    digests: list[bytes] = field(default_factory=list)  # of full blocks, as far as they were needed
    num_stored: int = 0
    num_pruned: int = 0  # of them, those that were left out: a token's slot is its position less that
    num_cached: int = 0  # prompt tokens that were not computed because their KV was there
    num_indexed: int = 0  # full blocks that the prefix cache was told of
    num_admitted: int = 0  # more than once if it was preempted
    num_reserved: int = 0  # blocks that are set aside for it
    ship_to: str = ""  # the migrator that its finished blocks are announced for
    num_announced: int = 0
    received_s: float = 0.0
    begin_s: float = 0.0
    sent_s: float = 0.0
    adopted_s: float = 0.0

    @classmethod
    def to_compute(cls, message: Prefill) -> Sequence:
        """Make the sequence of a prompt that is to be computed; what is lent of it is not borrowed yet."""
        return cls._of(message, ship_to=message.ship_to)

    @classmethod
    def to_adopt(cls, message: Decode) -> Sequence:
        """Make the sequence of a prompt that another engine has computed; its KV is not borrowed yet."""
        handle = message.handle
        return cls._of(
            message,
            handle=handle,
            path=message.path,
            path_reason=message.path_reason,
            num_pruned=handle.num_pruned,
        )

    @classmethod
    def _of(cls, message: Prefill | Decode, **fields: Any) -> Sequence:
        return cls(
            message.request,
            message.attempt,
            message.prompt,
            message.sampling,
            is_urgent=message.priority == "interactive",
            saves_kv=message.save_final_kv,
            tokens=list(message.generated),
            num_given=len(message.generated),
            **fields,
        )

    @property
    def key(self) -> tuple[str, int]:
        return self.request, self.attempt

    @property
    def leases(self) -> set[Lease]:
        """The leases that it reads under."""
        return {segment.lease for segment in self.segments}

    @property
    def is_lossy(self) -> bool:
        """Whether it goes on from KV that was pruned or went through a lossy codec."""
        return self.handle is not None and (self.handle.codec != "none" or self.handle.num_pruned > 0)

    @property
    def num_tokens(self) -> int:
        """Tokens that are known: prompt and generated."""
        return len(self.prompt) + len(self.tokens)

    @property
    def num_pending(self) -> int:
        """Known tokens whose KV is not stored; 1 while it decodes."""
        return self.num_tokens - self.num_stored

    @property
    def is_prompt(self) -> bool:
        """Whether there is more to compute than the last token's step."""
        return not self.tokens or self.num_pending > 1

    def set_tail_apart(self, num_tokens: int, block_tokens: int) -> None:
        """Take the partly filled block out of `lent`, if what is lent ends inside a block, after `num_tokens`."""
        full, tail = divmod(num_tokens, block_tokens)
        if tail:
            self.tail_block, self.num_lent = self.lent.pop(full, None), num_tokens

    @property
    def own_blocks(self) -> list[int]:
        """The blocks of the table that are ours."""
        return [block for block in self.blocks if block not in self.borrowed]

    def num_slots(self, num_tokens: int) -> int:
        """Return how many slots of the table the first `num_tokens` tokens take, the prompt at least."""
        return num_tokens - self.num_pruned

    def unannounced(self, block_tokens: int) -> list[tuple[int, tuple[int, ...]]]:
        """Return the runs of our own full blocks that were not announced, each with its first index in the table.

        There are none where nobody waits for them, or the prompt is complete: its last blocks go with the hand-over.
        """
        start, stop = self.num_announced, self.num_stored // block_tokens
        if not self.ship_to or len(self.tokens) > self.num_given:
            return []
        runs = groupby(range(start, stop), key=lambda index: self.blocks[index] in self.borrowed)
        own = [list(run) for is_borrowed, run in runs if not is_borrowed]
        return [(run[0], tuple(self.blocks[run[0] : run[-1] + 1])) for run in own]

    def token_ids(self, start: int, stop: int) -> list[int]:
        """Return known tokens `start .. stop`."""
        split = len(self.prompt)
        if stop <= split:
            return list(self.prompt[start:stop])
        if start >= split:
            return self.tokens[start - split : stop - split]
        return [*self.prompt[start:], *self.tokens[: stop - split]]

    def table_segments(self, owner: str, lease: Lease | None) -> tuple[Segment, ...]:
        """Describe the table, run by run: our own blocks, if `owner` lends them under `lease`, and what is borrowed."""
        lenders: dict[int, tuple[str, Lease | None]] = {b: (s.owner, s.lease) for s in self.segments for b in s.blocks}
        found = []
        for (name, under), run in groupby(
            enumerate(self.blocks), key=lambda item: lenders[item[1]] if item[1] in self.borrowed else (owner, lease)
        ):
            indices, blocks = zip(*run, strict=True)
            if under is not None:
                found.append(Segment(name, under, indices[0], blocks))
        return tuple(found)

"""`Sequence`: the engine's side of a request, its tokens and its block table. Tables and counts only, no tensors."""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass, field

from pdactors.messages import KVHandle, Sampling


@dataclass(slots=True, eq=False)
class Sequence:
    """One request's attempt on one engine.

    `blocks` is the table in token order: the first `num_borrowed` are read under a lease, the rest are ours. KV of the
    first `num_stored` tokens is stored; what follows is still to be computed.
    """

    request: str
    attempt: int
    prompt: abc.Sequence[int]
    sampling: Sampling
    is_urgent: bool = True
    handle: KVHandle | None = None  # where KV that others computed lies
    tokens: list[int] = field(default_factory=list)  # generated, the first by the prefill
    blocks: list[int] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)  # of the table's full blocks, as far as they are known
    num_borrowed: int = 0
    num_stored: int = 0
    num_cached: int = 0  # prompt tokens that were not computed because their KV was there
    num_indexed: int = 0  # full blocks that the prefix cache was told of
    num_reserved: int = 0  # blocks that it may still allocate
    received_s: float = 0.0
    begin_s: float = 0.0
    sent_s: float = 0.0
    adopted_s: float = 0.0

    @property
    def key(self) -> tuple[str, int]:
        return self.request, self.attempt

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

    @property
    def own_blocks(self) -> list[int]:
        return self.blocks[self.num_borrowed :]

    def token_ids(self, start: int, stop: int) -> list[int]:
        """Return known tokens `start .. stop`."""
        split = len(self.prompt)
        if stop <= split:
            return list(self.prompt[start:stop])
        if start >= split:
            return self.tokens[start - split : stop - split]
        return [*self.prompt[start:], *self.tokens[: stop - split]]

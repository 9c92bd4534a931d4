"""Who gets in: what can never be served is refused at once, what cannot be served soon, with a time. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from pdactors.config.cluster import ClusterConfig
from pdactors.errors import BadRequest, Overloaded, PDError, PromptTooLong
from pdactors.messages import Generate
from pdactors.policy.placement import PlacementPolicy

NUM_FINISHES = 64  # that the rate is measured over


@dataclass(frozen=True)
class Limits:
    """What of the cluster file the router decides by."""

    block_tokens: int
    max_model_len: int
    max_queue: int
    request_timeout_s: float
    prefix_key: bytes
    policy: PlacementPolicy = "locality"
    max_distance: int = 2
    transport: str = "auto"  # of KV
    overlaps: bool = True  # KV is moved while later chunks are computed
    data_transport: str = ""  # what moves it between nodes; nothing does
    prunes: bool = False  # the prefill leaves tokens out before KV is moved
    has_store: bool = False  # prefill publishes KV to its node's migrator, and that hands it over
    has_backing: bool = False  # behind that there is a store whose contents nobody but the migrators can tell
    pulls: bool = False  # what another node has of a prompt is brought before the rest is computed
    layout: str = ""  # fingerprint of the KV layout
    local_prefill_tokens: int = 0  # prompts with no more than that to compute are computed where they are decoded

    @classmethod
    def of(cls, config: ClusterConfig, *, max_model_len: int, prefix_key: bytes, layout: str) -> Limits:
        """Take them out of a cluster file; the model's length, the digests' key and the KV layout come beside it."""
        return cls(
            block_tokens=config.kv.block_tokens,
            max_model_len=max_model_len,
            max_queue=config.router.max_queue,
            request_timeout_s=config.router.request_timeout_s,
            prefix_key=prefix_key,
            policy=config.router.policy,
            max_distance=config.router.max_distance,
            transport=config.kv.transport,
            # which tokens stay is known at the end, and a store gets what is whole
            overlaps=config.kv.overlap and not config.prunes and not config.has_store,
            prunes=config.prunes,
            data_transport=config.data_transport if config.moves_kv else "",
            has_store=config.has_store,
            has_backing=bool(config.mooncake),
            pulls=config.is_separated and config.moves_kv and not config.mooncake,
            layout=layout,
            local_prefill_tokens=config.router.local_prefill_tokens,
        )

    @property
    def can_migrate(self) -> bool:
        return bool(self.data_transport)


class Pace:
    """How fast requests finish."""

    def __init__(self) -> None:
        self._finished_at: deque[float] = deque(maxlen=NUM_FINISHES)

    def finished(self, now: float) -> None:
        """Note that a request finished."""
        self._finished_at.append(now)

    def retry_after_s(self, queued: int, now: float) -> float:
        """Return when `queued` requests will have had their turn, by the recent rate; 1 s where there is none."""
        if len(self._finished_at) < 2 or now <= self._finished_at[0]:
            return 1.0
        rate = len(self._finished_at) / (now - self._finished_at[0])
        return round(max(0.1, queued / rate), 1)


def refusal(
    ask: Generate, limits: Limits, sequence_sizes: Sequence[int], queued: int, retry_after_s: float
) -> PDError | None:
    """Say why a new request cannot be taken; None when it can.

    `sequence_sizes` are the tokens that each engine could hold of one sequence, as far as that is known. An engine that
    starves may have to hold a whole sequence by itself, so prompt and answer together count.
    """
    prompt, answer = len(ask.prompt), ask.sampling.max_tokens
    if prompt >= limits.max_model_len:
        return PromptTooLong(f"prompt has {prompt} tokens; model.max_model_len {limits.max_model_len} leaves no room")
    size = max(sequence_sizes, default=0)
    if size and prompt >= size:
        return PromptTooLong(f"prompt has {prompt} tokens; kv.memory holds {size} of a sequence")
    if size and prompt + answer - 1 > size:
        return BadRequest(
            f"max_tokens: {answer} after a prompt of {prompt} tokens do not fit; kv.memory holds {size} of a sequence"
        )
    if queued >= limits.max_queue and ask.attempt == 1:  # what was admitted once is not turned away
        return Overloaded(f"{queued} requests are waiting (router.max_queue)", retry_after_s=retry_after_s)
    return None

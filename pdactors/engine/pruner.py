"""Prunes a prompt's KV: its last tokens are computed once more to see what they attend to, and the rest is packed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pdactors.engine.batch import Span, StepBatch
from pdactors.engine.model import PagedModel
from pdactors.kv.layout import KVLayout
from pdactors.kv.pruning import gather, num_kept, select, spread

WINDOW = 32  # last tokens whose attention decides


def num_packed(layout: KVLayout, num_tokens: int, share: float) -> int:
    """Return how many blocks hold what is kept of a prompt; 0 if pruning would save none, so that nothing is lost."""
    count = layout.num_blocks(num_kept(num_tokens, share))
    return count if count < layout.num_blocks(num_tokens) else 0


def num_scratch(layout: KVLayout, num_tokens: int) -> int:
    """Return how many blocks `prune` needs to work in: those that the window lies in."""
    return layout.num_blocks(num_tokens) - _window_start(num_tokens) // layout.block_tokens


def prepare(layout: KVLayout) -> None:
    """Compile what packs tokens, or load it."""
    blocks = np.zeros((2, layout.block_bytes), np.uint8)
    gather(layout, blocks, [0], np.zeros((layout.num_layers, layout.num_kv_heads, 1), np.int64), blocks, [1])


def prune(
    model: PagedModel,
    layout: KVLayout,
    arena: NDArray[np.uint8],
    prompt: Sequence[int],
    blocks: Sequence[int],
    share: float,
    scratch: Sequence[int],
    packed: Sequence[int],
) -> int:
    """Pack the KV of `share` of a prompt's tokens, which lies in `blocks`, into `packed`; return how many they are.

    Each layer and KV head keeps tokens of its own. `arena` is what the model is bound to; `scratch` and `packed` are
    written, as many blocks as `num_scratch` and `num_packed` say, `blocks` are only read.

    Raises:
        ValueError, InvariantError: a block or the share does not fit.
    """
    start, end = _window_start(len(prompt)), len(prompt)
    first = start // layout.block_tokens
    arena[list(scratch)] = arena[list(blocks[first:])]
    span = Span(0, end - start, end, [*blocks[:first], *scratch])
    scores = model.observe(StepBatch(prompt[start:], range(start, end), [span], []))
    kept = select(spread(scores), share)
    gather(layout, arena, blocks, kept, arena, packed)
    return int(kept.shape[2])


def _window_start(num_tokens: int) -> int:
    return max(0, num_tokens - WINDOW)

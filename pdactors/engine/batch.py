"""One step as the engine hands it to a model: the new tokens of all sequences, and where their KV lies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pdactors.errors import InvariantError


@dataclass(frozen=True, slots=True)
class Span:
    """Rows `start .. start + num_tokens` of a step: the last `num_tokens` tokens of a sequence.

    After the step the sequence has `context_len` tokens, token t in slot `t % block_tokens` of block
    `blocks[t // block_tokens]`. Only slots of the new tokens are written.
    """

    start: int
    num_tokens: int
    context_len: int
    blocks: Sequence[int]


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One step: the flattened new tokens of all sequences, and the rows whose logits are wanted."""

    input_ids: Sequence[int]
    positions: Sequence[int]
    spans: Sequence[Span]
    logit_rows: Sequence[int]


@dataclass(frozen=True, slots=True)
class Tables:
    """A step's block tables as arrays, checked: whoever uses them needs no checks of its own."""

    blocks: list[NDArray[np.int64]]  # of each span, those that hold its context
    slots: NDArray[np.int64]  # of each row: block * block_tokens + offset, where its K and V go


def check_tables(spans: Sequence[Span], num_rows: int, num_blocks: int, block_tokens: int) -> Tables:
    """Check the spans' tables and find the rows' slots.

    Raises:
        InvariantError: spans that do not tile the rows, a table too short or out of the arena, or a slot written twice.
    """
    blocks: list[NDArray[np.int64]] = []
    slots: list[NDArray[np.int64]] = []
    row = 0
    for span in spans:
        table = _checked_table(span, row, num_blocks, block_tokens)
        row += span.num_tokens
        tokens = np.arange(span.context_len - span.num_tokens, span.context_len)
        slots.append(table[tokens // block_tokens] * block_tokens + tokens % block_tokens)
        blocks.append(table)
    if row != num_rows:
        raise InvariantError(f"spans cover {row} of the step's {num_rows} rows")
    written = np.concatenate(slots) if slots else np.empty(0, np.int64)
    if len(np.unique(written)) != len(written):
        raise InvariantError("two rows of a step would be written to one slot")
    return Tables(blocks, written)


def _checked_table(span: Span, row: int, num_blocks: int, block_tokens: int) -> NDArray[np.int64]:
    """Return the blocks that hold the span's context."""
    if span.start != row or span.num_tokens < 1 or span.context_len < span.num_tokens:
        raise InvariantError(f"span of {span.num_tokens} tokens at row {span.start} does not follow row {row}")
    needed = -(-span.context_len // block_tokens)
    table = np.asarray(span.blocks[:needed], dtype=np.int64)
    if len(table) < needed:
        raise InvariantError(f"{len(table)} blocks cannot hold a context of {span.context_len} tokens")
    if table.min() < 0 or table.max() >= num_blocks:
        raise InvariantError(f"block ids {table.min()} to {table.max()} leave the arena of {num_blocks} blocks")
    return table

"""Attention over the node's KV arena, for any model that calls transformers' attention interface.

Owns the translation of a step's spans into arena slots; which blocks a sequence has is decided elsewhere.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AttentionMaskInterface

from pdactors.engine.batch import Span, check_tables
from pdactors.engine.observation import attention_mass
from pdactors.errors import ModelError

ATTENTION_NAME = "pdactors_paged"

# Arguments that change nothing here, whatever their value: they are other functions' business.
_IGNORED = frozenset(
    "cache cache_position cu_seq_lens_k cu_seq_lens_q deterministic logits_to_keep max_length_k max_length_q"
    " output_attentions output_hidden_states output_router_logits past_key_values position_embeddings position_ids"
    " return_dict use_cache".split()
)


@dataclass(slots=True)
class _SpanPlan:
    """A span with its tables as tensors; masks are made once per step and window, not per layer."""

    start: int
    end: int
    context_len: int
    blocks: torch.Tensor
    masks: dict[int | None, torch.Tensor] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        return self.end - self.start


class PagedStep:
    """What the attention function needs of one step; computed once and used by every layer.

    `arena` is `[blocks, layers, 2, kv_heads, plane]`, the planes as `KVLayout` says.
    """

    def __init__(self, arena: torch.Tensor, block_tokens: int, spans: Sequence[Span], num_rows: int) -> None:
        """Check the spans' tables and turn them into slots.

        Raises:
            InvariantError: spans that do not tile the rows, a table too short or out of the arena, or one slot written
                twice; nothing has been written then.
        """
        num_blocks, self.block_tokens = len(arena), block_tokens
        head_dim = arena.shape[-1] // block_tokens
        # Both as [blocks, layers, kv_heads, block_tokens, head_dim], whatever lies in memory.
        self.keys = arena[:, :, 0].view(*arena.shape[:2], arena.shape[3], block_tokens, head_dim)
        self.values = arena[:, :, 1].view(*arena.shape[:2], arena.shape[3], head_dim, block_tokens).transpose(-1, -2)
        self.attention_s = 0.0  # spent in attention, all layers together
        self.masses: dict[int, torch.Tensor] | None = None  # by layer, where the one span's attention is observed
        tables = check_tables(spans, num_rows, num_blocks, block_tokens)
        self.spans = [
            _SpanPlan(span.start, span.start + span.num_tokens, span.context_len, torch.from_numpy(table))
            for span, table in zip(spans, tables.blocks, strict=True)
        ]
        written = tables.slots
        self.slot_blocks = torch.from_numpy(written // self.block_tokens)
        self.slot_offsets = torch.from_numpy(written % self.block_tokens)

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store the rows' K and V, `[kv_heads, rows, head_dim]`."""
        for memory, rows in ((self.keys, key), (self.values, value)):
            memory[:, layer][self.slot_blocks, :, self.slot_offsets] = rows.transpose(0, 1)

    def gather(self, layer: int, span: _SpanPlan, first: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy K and V of tokens `first .. context_len` together, each `[kv_heads, tokens, head_dim]`.

        `first` is a multiple of block_tokens.
        """
        blocks = span.blocks[first // self.block_tokens :]

        def together(memory: torch.Tensor) -> torch.Tensor:
            found = memory[:, layer].index_select(0, blocks).transpose(0, 1)
            return found.flatten(1, 2)[:, : span.context_len - first]

        return together(self.keys), together(self.values)


def register() -> None:
    """Make `attn_implementation="pdactors_paged"` known to transformers; harmless when repeated.

    The mask must be registered too: without it transformers would ask nobody, and with it the answer is None on
    purpose, because `paged_attention` masks by itself.
    """
    AttentionInterface.register(ATTENTION_NAME, paged_attention)
    AttentionMaskInterface.register(ATTENTION_NAME, no_mask)


def no_mask(*_args: Any, **_kwargs: Any) -> None:
    """Return no mask: `paged_attention` knows each span's past and window."""


def paged_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    paged: PagedStep,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Write the rows' K and V into the arena, then attend for each span over its own context.

    `query` is `[1, heads, rows, head_dim]`, `key` and `value` `[1, kv_heads, rows, head_dim]`; returns
    `[1, rows, heads, head_dim]`.

    Raises:
        ModelError: an argument that would change the attention and that this function does not know.
    """
    began = time.perf_counter()
    check_arguments(attention_mask, others)
    layer: int = module.layer_idx
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    queries, keys, values = query[0], key[0], value[0]
    paged.write(layer, keys, values)
    output = query.new_empty(1, queries.shape[1], queries.shape[0], queries.shape[2])
    for span in paged.spans:
        window = sliding_window if sliding_window and sliding_window < span.context_len else None
        if span.num_tokens == span.context_len:
            first, k, v = 0, keys[:, span.start : span.end], values[:, span.start : span.end]
        else:
            past = span.context_len - span.num_tokens
            first = 0 if window is None else max(0, past - window + 1) // paged.block_tokens * paged.block_tokens
            k, v = paged.gather(layer, span, first)
        result = _attend(queries[:, span.start : span.end], k, v, span, first, window, scale, softcap)
        output[0, span.start : span.end] = result.transpose(0, 1)
        if paged.masses is not None:
            if window is not None:
                raise ModelError(f"layer {layer} sees a window of {window} tokens: their attention says too little")
            grouped = queries.view(k.shape[0], -1, *queries.shape[1:])
            paged.masses[layer] = attention_mass(grouped, k, scale, softcap)
    paged.attention_s += time.perf_counter() - began
    return output, None


def check_arguments(attention_mask: torch.Tensor | None, others: dict[str, Any]) -> None:
    """Refuse what `paged_attention` would silently leave out.

    Raises:
        ModelError: names the argument.
    """
    if attention_mask is not None:
        raise ModelError("the model passes an attention mask of its own")
    for name, value in others.items():
        harmless = value is None or name in _IGNORED
        harmless = harmless or (name == "dropout" and value == 0) or (name == "is_causal" and value is True)
        if not harmless:
            raise ModelError(f"the model's attention takes {name!r}, which pdactors does not support")


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    span: _SpanPlan,
    first: int,
    window: int | None,
    scale: float,
    softcap: float | None,
) -> torch.Tensor:
    """Attend `q` [heads, n, head_dim] over `k`, `v` [kv_heads, tokens from `first` on, head_dim]."""
    if span.num_tokens == 1:
        if window is not None:
            k, v = k[:, -window:], v[:, -window:]
        if softcap is None:  # the heads that share a KV head become the rows of one product
            return _sdpa(q.reshape(k.shape[0], -1, q.shape[2]), k, v, None, scale).reshape(q.shape)
        return _softcapped(q, k, v, None, scale, softcap)
    if softcap is not None:
        return _softcapped(q, k, v, _mask(span, first, window, q.dtype), scale, softcap)
    if span.num_tokens == span.context_len and window is None:
        return _sdpa(q, k, v, None, scale, is_causal=True)
    return _sdpa(q, k, v, _mask(span, first, window, q.dtype), scale)


def _sdpa(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float, is_causal: bool = False
) -> torch.Tensor:
    gqa = q.shape[0] != k.shape[0]
    return F.scaled_dot_product_attention(
        q[None], k[None], v[None], attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=gqa
    )[0]


def _softcapped(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float, softcap: float
) -> torch.Tensor:
    """Attend with scores `softcap * tanh(score / softcap)`, the softmax in float32 (Gemma 2)."""
    grouped = q.reshape(k.shape[0], -1, q.shape[2])  # [kv_heads, heads_per_kv_head * n, head_dim]
    scores = softcap * torch.tanh((grouped @ k.transpose(1, 2)) * scale / softcap)
    if mask is not None:
        scores = (scores.view(k.shape[0], -1, *mask.shape) + mask).view_as(scores)
    return (scores.softmax(-1, dtype=torch.float32).to(q.dtype) @ v).view_as(q)


def _mask(span: _SpanPlan, first: int, window: int | None, dtype: torch.dtype) -> torch.Tensor:
    """Return the additive mask `[n, context_len - first]`: causal, and not further back than the window."""
    if window not in span.masks:
        rows = torch.arange(span.context_len - span.num_tokens, span.context_len)[:, None]
        columns = torch.arange(first, span.context_len)
        hidden = columns > rows
        if window is not None:
            hidden |= columns <= rows - window
        span.masks[window] = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))
    return span.masks[window]

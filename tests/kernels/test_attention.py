from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit

from pdactors.kernels import attention, cpu
from pdactors.kernels.pack import padded, tiled_size
from pdactors.kernels.tiles import tile_config, tile_release

CONFIGURES = cpu.HAS_AMX
SHAPES = cpu.tile_shapes()
GUARD = 40  # elements on both sides of work memory
MARK = 7
LAYERS, KV_HEADS = 2, 2
some = settings(max_examples=25, deadline=None)


# fmt: off
@njit
def attend(
    shapes, queries, columns, group, past, context, arena, table, num_table, keys, values, block_stride, head_dim,
    block_tokens, scale, out, out_row, out_column, out_width, floats, elements, at,
):
    if CONFIGURES:
        tile_config(shapes)
    for first in range(0, columns, 16):
        attention.attend(
            queries, first * head_dim, min(16, columns - first), group, first, past, context, arena, table, num_table,
            keys, values, block_stride, head_dim, block_tokens, scale, out, out_row, out_column, out_width, floats, at,
            elements, at, context, num_table, 0,
        )
    if CONFIGURES:
        tile_release()
# fmt: on


@dataclass(frozen=True)
class Prompt:
    """A prompt of one KV head, and the blocks that it lies in."""

    kind: Any
    q: Any  # [tokens, group, head_dim]
    k: Any  # [tokens, head_dim]
    v: Any
    block_tokens: int
    table: Any
    head: int
    layer: int

    @property
    def tokens(self) -> int:
        return len(self.k)

    def arena(self, context: int) -> Any:
        """Return blocks that hold `context` tokens; all else is NaN."""
        bt, (_, head_dim) = self.block_tokens, self.k.shape
        arena = self.kind.nans(self.table.max() + 2, LAYERS, 2, KV_HEADS, bt * head_dim)
        for token in range(context):
            block = arena[self.table[token // bt], self.layer]
            block[0, self.head].reshape(bt, head_dim)[token % bt] = self.k[token]
            block[1, self.head].reshape(head_dim, bt)[:, token % bt] = self.v[token]
        return arena

    def packed_queries(self, begin: int, end: int) -> Any:
        """Return the column tiles of some tokens' queries; the columns that are not there are NaN."""
        _, group, head_dim = self.q.shape
        columns = (end - begin) * group
        wide = self.kind.nans(padded(columns, 16), head_dim)
        wide[:columns] = self.q[begin:end].reshape(columns, head_dim)
        pairs = wide.reshape(-1, 16, head_dim // 2, 2)
        return pairs.transpose((0, 2, 1, 3) if self.kind.dtype is np.uint16 else (0, 2, 3, 1)).ravel()

    def exact(self) -> Any:
        """Return what the tokens attend to, `[tokens, group, head_dim]`."""
        q, k, v = (self.kind.numbers(part) for part in (self.q, self.k, self.v))
        scores = np.einsum("tgd,sd->tgs", q, k) / k.shape[1] ** 0.5
        token = np.arange(self.tokens)
        scores = np.where(token <= token[:, None, None], scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        return weights / weights.sum(-1, keepdims=True) @ v

    def attended(self, past: int, context: int) -> Any:
        """Return what the kernel makes of tokens `past .. context`, once those before are stored."""
        kind, bt, (_, group, head_dim) = self.kind, self.block_tokens, self.q.shape
        rows, width = context - past, KV_HEADS * group * head_dim
        arena = self.arena(context)
        before = arena.copy()
        plane, layer_stride = bt * head_dim, 2 * KV_HEADS * bt * head_dim
        keys = self.layer * layer_stride + self.head * plane
        out_row = 3
        out = np.full(tiled_size(out_row + rows, width), MARK, kind.dtype)
        floats = np.full(attention.scratch_floats(head_dim) + 2 * GUARD, np.nan, np.float32)
        elements = kind.nans(attention.scratch_elements(head_dim) + 2 * GUARD)
        table = np.concatenate([[-(10**9)], self.table[: -(-context // bt)], [-(10**9)]])
        attend(
            SHAPES, self.packed_queries(past, context), rows * group, group, past, context, arena.reshape(-1), table, 1,
            keys, keys + layer_stride // 2, LAYERS * layer_stride, head_dim, bt, head_dim**-0.5 * np.log2(np.e),
            out, out_row, self.head * group * head_dim, width, floats, elements, GUARD,
        )  # fmt: skip
        assert np.array_equal(arena, before, equal_nan=True)
        for guarded in (floats, kind.numbers(elements)):
            assert np.isnan(guarded[:GUARD]).all()
            assert np.isnan(guarded[-GUARD:]).all()
        wide = out.reshape(-1, width // 32, 16, 32).transpose(0, 2, 1, 3).reshape(-1, KV_HEADS, group, head_dim)
        result = wide[out_row : out_row + rows, self.head].copy()
        wide[out_row : out_row + rows, self.head] = MARK
        assert (wide == MARK).all()
        assert not kind.is_nan(result).any()
        return result


@st.composite
def prompts(draw: Any, most: int = 150) -> Any:
    """Make prompts once their `kind` is known; their scores are flat or steep, and may rise all the way."""
    head_dim, group = draw(st.sampled_from([32, 64, 96, 128])), draw(st.integers(1, 9))
    tokens, block_tokens = draw(st.integers(1, most)), draw(st.sampled_from([32, 64]))
    steepness, rises = draw(st.sampled_from([0.1, 1.0, 4.0])), draw(st.booleans())
    head, layer, seed = (
        draw(st.integers(0, KV_HEADS - 1)),
        draw(st.integers(0, LAYERS - 1)),
        draw(st.integers(0, 2**32 - 1)),
    )

    def make(kind: Any) -> Prompt:
        rng = np.random.default_rng(seed)
        q, k, v = (
            rng.normal(size=size) for size in ((tokens, group, head_dim), (tokens, head_dim), (tokens, head_dim))
        )
        if rises:
            k *= np.linspace(0.1, 2.0, tokens)[:, None]
        blocks = -(-tokens // block_tokens)
        table = rng.choice(2 * blocks + 1, blocks, replace=False)
        parts = (kind.elements(part) for part in (q * steepness, k, v))
        return Prompt(kind, *parts, block_tokens, table, head, layer)

    return make


def error(got: Any, wanted: Any) -> float:
    return float(np.sqrt(((got - wanted) ** 2).mean() / (wanted**2).mean()))


@some
@given(make=prompts())
def test_attention_is_that_of_numpy_and_sees_nothing_but_its_context(kind: Any, make: Any) -> None:
    prompt = make(kind)
    assert error(kind.numbers(prompt.attended(0, prompt.tokens)), prompt.exact()) < kind.attention_error


@some
@given(make=prompts(400))
def test_one_token_attends_to_all_before_it(kind: Any, make: Any) -> None:
    prompt = make(kind)
    got = kind.numbers(prompt.attended(prompt.tokens - 1, prompt.tokens))
    assert error(got, prompt.exact()[-1:]) < kind.attention_error


@some
@given(make=prompts(), data=st.data())
def test_a_token_attends_alike_however_the_prompt_is_cut(kind: Any, make: Any, data: Any) -> None:
    prompt = make(kind)
    cuts = data.draw(st.sets(st.integers(1, prompt.tokens), max_size=6))
    ends = sorted({*cuts, prompt.tokens})
    parts = [prompt.attended(past, end) for past, end in zip([0, *ends[:-1]], ends, strict=True)]
    assert np.array_equal(np.concatenate(parts), prompt.attended(0, prompt.tokens))


@some
@given(make=prompts(), data=st.data())
def test_a_query_head_attends_alike_whichever_share_its_tile(kind: Any, make: Any, data: Any) -> None:
    prompt = make(kind)
    heads = data.draw(st.permutations(range(prompt.q.shape[1])))
    heads = heads[: data.draw(st.integers(1, len(heads)))]
    fewer = replace(prompt, q=prompt.q[:, heads])
    assert np.array_equal(fewer.attended(0, prompt.tokens), prompt.attended(0, prompt.tokens)[:, heads])


@some
@given(make=prompts(), token=st.integers(0, 149), seed=st.integers(0, 2**32 - 1))
def test_a_token_does_not_see_those_after_it(kind: Any, make: Any, token: int, seed: int) -> None:
    prompt = make(kind)
    token %= prompt.tokens
    rng = np.random.default_rng(seed)
    k, v = prompt.k.copy(), prompt.v.copy()
    k[token + 1 :], v[token + 1 :] = kind.elements(rng.normal(size=(2, prompt.tokens - token - 1, k.shape[1])) * 50)
    changed = replace(prompt, k=k, v=v).attended(0, prompt.tokens)
    assert np.array_equal(changed[: token + 1], prompt.attended(0, prompt.tokens)[: token + 1])

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdactors.kv.layout import KVLayout
from pdactors.kv.pruning import RECENT, SINKS, gather, num_kept, select, spread

some = settings(max_examples=40, deadline=None)
shares = st.floats(0.01, 1.0)
LAYOUT = KVLayout(2, 3, 5, 4, "bfloat16")


@some
@given(tokens=st.integers(1, 400), share=shares, seed=st.integers(0, 2**32 - 1))
def test_sinks_and_recent_tokens_are_kept_and_of_the_rest_the_heaviest(tokens, share, seed):
    scores = np.random.default_rng(seed).random((2, 3, tokens))
    kept = select(scores, share)
    count = num_kept(tokens, share)
    assert kept.shape == (2, 3, count)
    assert (np.diff(kept) > 0).all()
    recent = min(RECENT, (count - min(SINKS, count) + 1) // 2)
    certain = {*range(min(SINKS, tokens)), *range(tokens - recent, tokens)}
    for chosen, score in zip(kept.reshape(-1, count), scores.reshape(-1, tokens), strict=True):
        assert certain <= set(chosen)
        others = set(range(tokens)) - certain
        heavy = sorted(others, key=lambda token: -score[token])[: count - len(certain)]
        assert set(chosen) == certain | set(heavy)


@some
@given(tokens=st.integers(1, 40), reach=st.integers(0, 9), seed=st.integers(0, 2**32 - 1))
def test_a_token_has_the_highest_score_of_its_neighbours(tokens, reach, seed):
    scores = np.random.default_rng(seed).random((2, 3, tokens))
    found = spread(scores, reach)
    for i in range(tokens):
        assert (found[..., i] == scores[..., max(0, i - reach) : i + reach + 1].max(-1)).all()


def test_of_equal_scores_the_first_tokens_are_kept():
    kept = select(np.zeros((1, 1, 100)), 0.1)[0, 0]
    assert list(kept) == [0, 1, 2, 3, 4, 5, 6, 97, 98, 99]


def test_all_is_kept_when_all_is_asked_for():
    assert list(select(np.ones((1, 1, 7)), 1.0)[0, 0]) == list(range(7))


@pytest.mark.parametrize("share", [0.0, -1.0, 1.1, float("nan")])
def test_a_share_out_of_range_is_refused(share):
    with pytest.raises(ValueError, match="a share of tokens"):
        num_kept(10, share)


def test_scores_that_say_nothing_are_refused():
    with pytest.raises(ValueError, match="not finite"):
        select(np.full((1, 1, 9), np.nan), 0.5)
    with pytest.raises(ValueError, match=r"expected \[layers"):
        select(np.ones((3, 9)), 0.5)


def planes(layout: KVLayout, blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return K and V as `[layers, kv_heads, tokens, head_dim]` of blocks that follow each other."""
    found = blocks.view(np.uint16 if layout.itemsize == 2 else np.uint32).reshape(len(blocks), *layout.shape)
    shape = len(blocks), layout.num_layers, layout.num_kv_heads
    keys = found[:, :, 0].reshape(*shape, layout.block_tokens, layout.head_dim)
    values = found[:, :, 1].reshape(*shape, layout.head_dim, layout.block_tokens).swapaxes(-1, -2)
    together = (part.transpose(1, 2, 0, 3, 4) for part in (keys, values))
    return tuple(part.reshape(*part.shape[:2], -1, layout.head_dim) for part in together)


@some
@given(
    dtype=st.sampled_from(["bfloat16", "float32"]),
    head_dim=st.integers(1, 20),
    block_tokens=st.integers(1, 9),
    share=shares,
    seed=st.integers(0, 2**32 - 1),
)
def test_kept_tokens_lie_together_in_order_and_nothing_else_is_touched(dtype, head_dim, block_tokens, share, seed):
    layout = KVLayout(2, 3, head_dim, block_tokens, dtype)
    rng = np.random.default_rng(seed)
    arena = rng.integers(0, 256, (12, layout.block_bytes), np.uint8)
    before = arena.copy()
    blocks, rows = [7, 0, 4, 9, 2], [11, 1, 3, 5, 8]
    kept = select(rng.random((2, 3, 5 * block_tokens)), share)
    gather(layout, arena, blocks, kept, arena, rows)
    for exact, found in zip(planes(layout, before[blocks]), planes(layout, arena[rows]), strict=True):
        count = kept.shape[2]
        assert (found[:, :, :count] == np.take_along_axis(exact, kept[..., None], 2)).all()
    for was, now in zip(planes(layout, before[rows]), planes(layout, arena[rows]), strict=True):
        assert (was[:, :, kept.shape[2] :] == now[:, :, kept.shape[2] :]).all()
    others = [block for block in range(12) if block not in rows]
    assert (arena[others] == before[others]).all()


def test_what_does_not_fit_is_refused():
    arena = np.zeros((6, LAYOUT.block_bytes), np.uint8)
    kept = np.zeros((2, 3, 5), np.int64)
    kept[:] = np.arange(5)
    for blocks, rows, tokens, message in [
        ([0, 6], [2, 3], kept, "not all among the 6 of the source"),
        ([0, 1], [2, -1], kept, "of the target"),
        ([0, 1], [2, 2], kept, "named twice"),
        ([0, 1], [2, 1], kept, "both read and written"),
        ([0, 1], [2], kept, "cannot hold 5 tokens"),
        ([0, 1], [2, 3], kept + 4, "tokens 4 to 8"),
        ([0, 1], [2, 3], kept[:, :2], "is not int64"),
    ]:
        with pytest.raises(ValueError, match=message):
            gather(LAYOUT, arena, blocks, tokens, arena, rows)
    with pytest.raises(ValueError, match="expected uint8"):
        gather(LAYOUT, arena[:, 1:], [0], kept[..., :1], arena, [1])

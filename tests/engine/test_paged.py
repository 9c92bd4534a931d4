from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface

from pdactors.engine import paged as module
from pdactors.engine.batch import Span
from pdactors.engine.paged import ATTENTION_NAME, PagedStep, paged_attention, register
from pdactors.errors import InvariantError, ModelError

LAYERS, KV_HEADS, HEADS, BLOCK_TOKENS, HEAD_DIM = 2, 2, 6, 4, 8


def arena(num_blocks: int = 8) -> torch.Tensor:
    return torch.full((num_blocks, LAYERS, 2, KV_HEADS, BLOCK_TOKENS * HEAD_DIM), float("nan"))


def rows(num_rows: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(
        torch.randn(1, heads, num_rows, HEAD_DIM, generator=generator) for heads in (HEADS, KV_HEADS, KV_HEADS)
    )


def attend(paged: PagedStep, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int = 1, **options: Any) -> Any:
    return paged_attention(SimpleNamespace(layer_idx=layer), q, k, v, None, paged=paged, **options)[0]


def plain(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float, window: int | None, softcap: float | None
) -> torch.Tensor:
    """Attention of one whole sequence, written out; returns `[rows, heads, head_dim]`."""
    num_rows = q.shape[2]
    scores = torch.einsum("hqd,hkd->hqk", q[0], k[0].repeat_interleave(HEADS // KV_HEADS, 0)) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    for i in range(num_rows):
        for j in range(num_rows):
            if j > i or (window and j <= i - window):
                scores[:, i, j] = float("-inf")
    return torch.einsum("hqk,hkd->qhd", scores.softmax(-1), v[0].repeat_interleave(HEADS // KV_HEADS, 0))


@pytest.mark.parametrize("cuts", [[11], [4, 4, 3], [1] * 11, [5, 1, 5], [10, 1]])
@pytest.mark.parametrize("window", [None, 1, 3, 4, 11, 50])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_attention_in_chunks_equals_the_formula(cuts: list[int], window: int | None, softcap: float | None) -> None:
    q, k, v = rows(11)
    blocks, memory, done = np.array([6, 0, 3, 5]), arena(), 0  # the last block is not needed
    expected = plain(q, k, v, scale=0.3, window=window, softcap=softcap)
    for size in cuts:
        part = slice(done, done + size)
        done += size
        paged = PagedStep(memory, BLOCK_TOKENS, [Span(0, size, done, blocks)], size)
        options = {"scaling": 0.3, "sliding_window": window, "softcap": softcap}
        found = attend(paged, q[:, :, part], k[:, :, part], v[:, :, part], **options)
        torch.testing.assert_close(found[0], expected[part], rtol=1e-5, atol=1e-6)


def test_spans_of_one_step_do_not_see_each_other() -> None:
    q, k, v = rows(9)
    paged = PagedStep(arena(), BLOCK_TOKENS, [Span(0, 5, 5, [1, 2]), Span(5, 4, 4, [7])], 9)
    found = attend(paged, q, k, v)
    for part in (slice(0, 5), slice(5, 9)):
        expected = plain(q[:, :, part], k[:, :, part], v[:, :, part], scale=HEAD_DIM**-0.5, window=None, softcap=None)
        torch.testing.assert_close(found[0, part], expected, rtol=1e-5, atol=1e-6)


def test_keys_and_values_go_to_their_layer_and_slots() -> None:
    memory = arena()
    q, k, v = rows(6)
    attend(PagedStep(memory, BLOCK_TOKENS, [Span(0, 6, 6, [5, 2])], 6), q, k, v, layer=0)
    keys = memory[:, :, 0].unflatten(-1, (BLOCK_TOKENS, HEAD_DIM))
    values = memory[:, :, 1].unflatten(-1, (HEAD_DIM, BLOCK_TOKENS))
    torch.testing.assert_close(keys[5, 0], k[0, :, :4])
    torch.testing.assert_close(values[2, 0, :, :, :2], v[0, :, 4:].transpose(1, 2))
    assert keys[2, 0, :, 2:].isnan().all()
    assert values[2, 0, :, :, 2:].isnan().all()
    assert memory[:, 1].isnan().all()
    assert memory[[0, 1, 3, 4, 6, 7]].isnan().all()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("position_bias", torch.zeros(1)),
        ("head_mask", torch.ones(1)),
        ("s_aux", torch.zeros(HEADS)),
        ("indices", [0]),
        ("dropout", 0.1),
        ("is_causal", False),
        ("never_heard_of", 0),
    ],
)
def test_an_argument_that_would_be_left_out_is_refused(name: str, value: Any) -> None:
    memory = arena()
    paged = PagedStep(memory, BLOCK_TOKENS, [Span(0, 2, 2, [0])], 2)
    with pytest.raises(ModelError, match=name):
        attend(paged, *rows(2), **{name: value})
    assert memory.isnan().all()


def test_harmless_arguments_are_accepted() -> None:
    paged = PagedStep(arena(), BLOCK_TOKENS, [Span(0, 2, 2, [0])], 2)
    attend(paged, *rows(2), dropout=0.0, is_causal=True, position_ids=torch.zeros(1), s_aux=None, use_cache=False)


def test_a_mask_from_the_model_is_refused() -> None:
    paged = PagedStep(arena(), BLOCK_TOKENS, [Span(0, 2, 2, [0])], 2)
    with pytest.raises(ModelError, match="mask of its own"):
        paged_attention(SimpleNamespace(layer_idx=0), *rows(2), torch.zeros(1, 1, 2, 2), paged=paged)


def test_two_spans_may_not_write_one_slot_but_may_read_one_block() -> None:
    PagedStep(arena(), BLOCK_TOKENS, [Span(0, 1, 5, [3, 0]), Span(1, 1, 5, [3, 1])], 2)
    with pytest.raises(InvariantError, match="one slot"):
        PagedStep(arena(), BLOCK_TOKENS, [Span(0, 1, 5, [3, 0]), Span(1, 2, 6, [4, 0])], 3)


def test_the_time_of_all_layers_is_added_up_and_each_step_begins_at_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([1.0, 1.5, 7.0, 7.25])
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    paged = PagedStep(arena(), BLOCK_TOKENS, [Span(0, 2, 2, [0])], 2)
    for layer, seconds in ((0, 0.5), (1, 0.75)):
        attend(paged, *rows(2), layer=layer)
        assert paged.attention_s == seconds
    assert PagedStep(arena(), BLOCK_TOKENS, [Span(0, 2, 2, [0])], 2).attention_s == 0.0


def test_registering_twice_is_harmless_and_the_mask_is_none() -> None:
    register()
    register()
    assert AttentionInterface()[ATTENTION_NAME] is paged_attention
    assert AttentionMaskInterface()[ATTENTION_NAME](batch_size=1, mask_function=None) is None

"""What a loaded model must show before it serves: that all its attention passes through ours, and means the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import AttentionInterface, AttentionMaskInterface

from pdactors.engine.batch import Span, StepBatch
from pdactors.engine.paged import ATTENTION_NAME, check_arguments
from pdactors.engine.shape import ModelDtype, ModelShape
from pdactors.errors import ModelError

if TYPE_CHECKING:
    from pdactors.engine.model import PagedModel

_INSPECTION_NAME = "pdactors_inspection"
_FULL = 0  # marker of a causal mask without window
_UNKNOWN = -1  # marker of any other mask
_MAX_POSITION = 2**17  # masks are looked at up to here
_FOREIGN_ERRORS = (
    TypeError,
    ValueError,
    RuntimeError,
    AttributeError,
    KeyError,
    IndexError,
    AssertionError,
    ImportError,
)

# Greatest difference of logits, in standard deviations of the reference's, that rounding explains. A 30-layer model
# shows 2e-5, 0.04 and 0.3; logits that have nothing to do with each other differ by 5 and more.
TOLERANCE: dict[ModelDtype, float] = {"float32": 2e-3, "float16": 0.25, "bfloat16": 1.0}
_PROMPT_TOKENS = 40
_BLOCK_TOKENS = 16


class _Inspection:
    """Collects what each layer's attention was called with."""

    def __init__(self, shape: ModelShape) -> None:
        self.shape = shape
        self.layers: list[int] = []


def inspect_attention(model: Any, shape: ModelShape) -> None:
    """Run one token with an attention function that only looks at its arguments.

    Finds layers that bypass the attention interface, head sizes or counts that differ from the config's, arguments that
    would change the attention, and masks other than a causal one with the layer's window, at any distance: a mask
    function that transformers would have evaluated is evaluated here at far positions, and what it is travels to the
    layer in place of the mask.

    Raises:
        ModelError: names what was found.
    """
    AttentionInterface.register(_INSPECTION_NAME, _inspecting_attention)
    AttentionMaskInterface.register(_INSPECTION_NAME, _mask_marker)
    inspection = _Inspection(shape)
    model.set_attn_implementation(_INSPECTION_NAME)
    try:
        with torch.inference_mode():
            model(
                input_ids=torch.zeros(1, 1, dtype=torch.int64),
                position_ids=torch.zeros(1, 1, dtype=torch.int64),
                use_cache=False,
                paged=inspection,
            )
    except _FOREIGN_ERRORS as error:
        raise ModelError(f"{shape.architecture} does not run with paged attention: {error}") from error
    finally:
        model.set_attn_implementation(ATTENTION_NAME)
    if sorted(inspection.layers) != list(range(shape.num_layers)):
        through = len(set(inspection.layers))
        raise ModelError(
            f"{shape.architecture} passes {through} of its {shape.num_layers} layers through transformers' attention"
            " interface, once each; pdactors needs all of them"
        )


def compare_with_eager(paged: PagedModel, eager: Callable[[list[int]], torch.Tensor]) -> None:
    """Hold paged logits of two interleaved random sequences against `eager`'s of the whole sequences.

    Each is computed in two chunks and two single tokens, over scattered blocks of a small arena of its own; leaves the
    model unbound.

    Raises:
        ModelError: the difference is more than rounding.
    """
    layout = paged.layout_for(_BLOCK_TOKENS)
    rng = np.random.default_rng(1)
    length = min(_PROMPT_TOKENS + 2, paged.shape.max_position)
    sequences = rng.integers(paged.shape.vocab_size, size=(2, length)).tolist()
    per_sequence = layout.num_blocks(length)
    ids = rng.permutation(2 * per_sequence).tolist()
    tables = [ids[:per_sequence], ids[per_sequence:]]
    paged.bind(np.full((len(ids), layout.block_bytes), 0xFF, np.uint8), layout)  # NaN where nothing was written
    found: list[list[torch.Tensor]] = [[], []]
    steps = [(0, length // 2), (length // 2, length - 2), (length - 2, length - 1), (length - 1, length)]
    try:
        for begin, end in steps:
            parts = torch.split(paged.forward(_both(sequences, tables, begin, end)), end - begin)
            for logits, part in zip(found, parts, strict=True):
                logits.append(part)
    finally:
        paged.unbind()
    for tokens, logits in zip(sequences, found, strict=True):
        expected = eager(tokens)
        difference = float((torch.cat(logits) - expected).abs().max() / expected.std())
        if not difference <= TOLERANCE[paged.dtype]:  # NaN fails too
            raise ModelError(
                f"{paged.shape.architecture} gives other logits with paged than with eager attention: they differ by"
                f" {difference:.3g} standard deviations, more than {TOLERANCE[paged.dtype]:.3g}"
            )


def _both(sequences: list[list[int]], tables: list[list[int]], begin: int, end: int) -> StepBatch:
    """Return the step that computes tokens `begin .. end` of both sequences."""
    size = end - begin
    return StepBatch(
        input_ids=[token for sequence in sequences for token in sequence[begin:end]],
        positions=[*range(begin, end)] * 2,
        spans=[Span(i * size, size, end, table) for i, table in enumerate(tables)],
        logit_rows=range(2 * size),
    )


def _inspecting_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    paged: _Inspection,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    check_arguments(None, others)
    shape, layer = paged.shape, module.layer_idx
    expected = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads, *[shape.head_dim] * 3)
    found = (query.shape[1], key.shape[1], value.shape[1], query.shape[3], key.shape[3], value.shape[3])
    if found != expected:
        raise ModelError(
            f"layer {layer} of {shape.architecture} has heads (query, key, value) {found[:3]} of sizes {found[3:]},"
            f" but its config says {expected[:3]} of {expected[3:]}"
        )
    marker = _UNKNOWN if attention_mask is None else int(attention_mask.max())
    window = sliding_window if sliding_window and sliding_window < _MAX_POSITION else _FULL
    if marker != window:
        raise ModelError(
            f"layer {layer} of {shape.architecture} uses an attention mask that is not causal with a window of"
            f" {sliding_window}"
        )
    paged.layers.append(layer)
    return torch.zeros_like(query).transpose(1, 2), None


def _mask_marker(*_args: Any, mask_function: Callable[..., torch.Tensor], **_kwargs: Any) -> torch.Tensor:
    """Return, in place of a mask, its window (`_FULL` for none) or `_UNKNOWN`."""
    columns, zero = torch.arange(_MAX_POSITION), torch.tensor(0)
    last = mask_function(zero, zero, torch.tensor(_MAX_POSITION - 1), columns)
    window = int(last.broadcast_to(columns.shape).sum())
    powers = 2 ** torch.arange(_MAX_POSITION.bit_length())
    rows = torch.cat([powers - 1, powers[:-1] + 1])[:, None]
    columns = torch.unique(torch.cat([rows + delta for delta in (-window, 1 - window, -1, 0, 1)] + [rows // 2]))
    columns = columns[(columns >= 0) & (columns < _MAX_POSITION)]
    expected = (columns <= rows) & (columns > rows - window)
    same = torch.equal(mask_function(zero, zero, rows, columns).broadcast_to(expected.shape), expected)
    marker = _UNKNOWN if not same else window if window < _MAX_POSITION else _FULL
    return torch.full((1, 1, 1, 1), marker)

"""`CostModel`: how long what the policies decide takes. Made of a data sheet by `roofline`, or measured by `calibrate`.

A step of some sequences takes

    body(rows) + head(logits) + kv_token_s * kv_tokens + pair_s * pairs + sequence_s * sequences + step_s

where rows are the tokens that it computes, logits those it samples from, kv_tokens the context that decoding sequences
read, and pairs the sum over prompt chunks of (token, token of its context). `body` and `head` are piecewise linear,
which holds a roofline's knee exactly and a measured curve as well as its points lie.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec import Struct

from pdactors.engine.batch import Span
from pdactors.engine.shape import ModelDtype
from pdactors.errors import ConfigError
from pdactors.kv.codec import CodecName
from pdactors.messages import explain
from pdactors.policy.codec_choice import CodecCost
from pdactors.sim.hardware import Hardware, Links
from pdactors.sim.shapes import DTYPE_BYTES, ModelSize

COST_VERSION = 2


class Curve(Struct, frozen=True):
    """Seconds over a count, by straight lines between points; beyond the last by the last line's slope."""

    points: tuple[tuple[float, float], ...]

    def at(self, count: float) -> float:
        """Return the seconds for a count; nothing takes none."""
        points = self.points
        if count <= points[0][0]:
            return points[0][1] if count > 0 else 0.0
        i = min(bisect_left(points, (count, -1.0)), len(points) - 1)
        if i == 0:
            return points[0][1]
        (x0, y0), (x1, y1) = points[i - 1], points[i]
        return y0 + (y1 - y0) * (count - x0) / (x1 - x0)


class StepWork(NamedTuple):
    """What a step computes, in the terms of the formula above."""

    rows: int
    logits: int
    kv_tokens: int
    pairs: float
    sequences: int

    @classmethod
    def of(cls, spans: Iterable[Span], num_logits: int) -> StepWork:
        rows = kv_tokens = sequences = 0
        pairs = 0.0
        for span in spans:
            sequences += 1
            rows += span.num_tokens
            if span.num_tokens == 1:
                kv_tokens += span.context_len
            else:
                pairs += span.num_tokens * (span.context_len - (span.num_tokens - 1) / 2)
        return cls(rows, num_logits, kv_tokens, pairs, sequences)


class Crowd(Struct, frozen=True):
    """How much longer a step takes for each other engine of the host that is in a step: they share its memory.

    It matters what either of them does: only decodes, or prompts.
    """

    decode_by_decode: float = 0.0
    decode_by_prompt: float = 0.0
    prompt_by_decode: float = 0.0
    prompt_by_prompt: float = 0.0

    def slowdown(self, is_decode: bool, decodes: int, prompts: int) -> float:
        """Return how many times as long a step takes beside so many that decode, and so many with prompts."""
        if is_decode:
            return 1 + self.decode_by_decode * decodes + self.decode_by_prompt * prompts
        return 1 + self.prompt_by_decode * decodes + self.prompt_by_prompt * prompts


class CostModel(Struct, frozen=True):
    """All durations of one kind of engine and its surroundings. Seconds, unless a name says otherwise."""

    name: str
    model: str
    dtype: ModelDtype
    body: Curve
    head: Curve
    kv_token_s: float
    pair_s: float
    sequence_s: float
    step_s: float
    links: Links
    control_s: float  # one message
    request_s: float = 0.0  # what a request takes before the router has it: connection, tokeniser
    codecs: dict[CodecName, CodecCost] = {}
    crowd: Crowd = Crowd()
    version: int = COST_VERSION

    def step(self, work: StepWork) -> float:
        """Return how long a step takes."""
        return (
            self.body.at(work.rows)
            + self.head.at(work.logits)
            + self.kv_token_s * work.kv_tokens
            + self.pair_s * work.pairs
            + self.sequence_s * work.sequences
            + self.step_s
        )


def roofline(model: ModelSize, dtype: ModelDtype, hardware: Hardware, tensor_parallel: int = 1) -> CostModel:
    """Return the costs of an engine of `tensor_parallel` devices by their data sheet; sources in docs/simulator.md.

    Raises:
        ConfigError: the devices do not divide the model.
    """
    tp = tensor_parallel
    if model.num_heads % tp:
        raise ConfigError(f"{tp} devices do not divide the {model.num_heads} heads of {model.name}")
    flops_s, bytes_s = tp * hardware.flops_s * hardware.flops_share, tp * hardware.bytes_s * hardware.bytes_share
    size = DTYPE_BYTES[dtype]
    # [rows] a layer's two all-reduces by ring: 2 (n - 1) / n of the activations pass each device's link
    sent = 2 * model.num_layers * 2 * (tp - 1) / tp * model.hidden_size * size / hardware.links.host.bytes_s
    fixed_s = 2 * model.num_layers * hardware.collective_s if tp > 1 else 0.0
    kv_bytes = 2 * model.num_layers * model.num_kv_heads * model.head_dim * size
    return CostModel(
        name=f"{hardware.name}" + (f" x {tp}" if tp > 1 else ""),
        model=model.name,
        dtype=dtype,
        body=_knee(model.body_params, size, flops_s, bytes_s, sent, fixed_s),
        head=_knee(model.head_params, size, flops_s, bytes_s, 0.0, 0.0),
        kv_token_s=max(kv_bytes / bytes_s, model.pair_flops / flops_s),
        pair_s=model.pair_flops / (tp * hardware.flops_s * hardware.attention_share),
        sequence_s=hardware.sequence_s,
        step_s=hardware.step_s,
        links=hardware.links,
        control_s=hardware.control_s,
        codecs={name: CodecCost(ratio, bytes_s / 2, bytes_s / 2) for name, ratio in _CODEC_RATIOS.items()},
    )


_CODEC_RATIOS: dict[CodecName, float] = {"int8": 0.5625, "int4": 0.375}  # kv/codec.py


def _knee(params: int, size: int, flops_s: float, bytes_s: float, sent_s: float, fixed_s: float) -> Curve:
    """Reading the weights once, or the products of all rows, whichever takes longer."""
    read_s, row_s = params * size / bytes_s, 2 * params / flops_s
    counts = (1.0, max(2.0, read_s / row_s), max(4.0, 2 * read_s / row_s))
    return Curve(tuple((count, max(read_s, count * row_s) + fixed_s + count * sent_s) for count in counts))


def read_cost(path: Path) -> CostModel:
    """Read what `calibrate` wrote; raises ConfigError that names the file."""
    try:
        cost = msgspec.json.decode(path.read_bytes(), type=CostModel)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {explain(error)}") from error
    if cost.version != COST_VERSION:
        raise ConfigError(f"{path}: version {cost.version} of a cost model; this is {COST_VERSION}: calibrate again")
    for name, curve in (("body", cost.body), ("head", cost.head)):
        counts = [count for count, _ in curve.points]
        if len(counts) < 2 or counts != sorted(set(counts)):
            raise ConfigError(f"{path}: {name}: at least two points are needed, in rising order")
    return cost

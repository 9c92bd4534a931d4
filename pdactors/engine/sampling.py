"""Choose the next tokens from logits. Randomness is keyed by (seed, position) and by nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from pdactors.errors import PDError
from pdactors.kernels.choose import scan
from pdactors.messages import Sampling, TopLogprob


@dataclass(frozen=True, slots=True)
class SampleRow:
    """How to choose the token of one row of logits."""

    sampling: Sampling
    position: int  # index of the generated token, from 0
    banned: tuple[int, ...] = ()  # ids that must not be chosen


@dataclass(frozen=True, slots=True)
class Sampled:
    """A chosen token; log-probabilities are the model's own, before temperature, filters and bans."""

    token_id: int
    logprob: float | None = None  # when the row asked for logprobs
    top: tuple[TopLogprob, ...] = ()  # the most likely tokens, best first; the chosen one may be among them


def sample(logits: torch.Tensor, rows: Sequence[SampleRow]) -> list[Sampled]:
    """Choose one token for each row of `logits` [rows, vocab] float32.

    Temperature 0 takes the most likely token, the lowest id of equals. Otherwise temperature, then top_k, then top_p,
    as Hugging Face and vLLM order them, and one draw by inverse distribution function in the order of ids.

    Raises:
        PDError: logits that are not finite, or every token of a row is banned.
    """
    if logits.ndim != 2 or logits.shape[0] != len(rows):
        raise ValueError(f"{len(rows)} rows to sample, but logits of shape {tuple(logits.shape)}")
    if not rows:
        return []
    values: NDArray[np.float32] = logits.detach().to("cpu", torch.float32).contiguous().numpy()
    best = np.empty(len(rows), np.int64)
    scan(values.reshape(-1), len(rows), values.shape[1], values.shape[1], best)
    if best.min() < 0:
        raise PDError(f"the model's logits are not finite in rows {np.flatnonzero(best < 0).tolist()}")
    return [_sample_row(values[i], int(best[i]), row) for i, row in enumerate(rows)]


def _sample_row(values: NDArray[np.float32], best: int, row: SampleRow) -> Sampled:
    allowed = values
    if row.banned:
        allowed = values.copy()
        allowed[list(row.banned)] = -np.inf
        best = int(allowed.argmax())
        if allowed[best] == -np.inf:
            raise PDError("every token is banned")
    token_id = best if row.sampling.temperature == 0 else _draw(allowed, row)
    if not row.sampling.logprobs:
        return Sampled(token_id)
    logprobs = _log_softmax(values)
    top = tuple(TopLogprob(int(i), float(logprobs[i])) for i in _best(values, row.sampling.logprobs))
    return Sampled(token_id, float(logprobs[token_id]), top)


def _draw(values: NDArray[np.float32], row: SampleRow) -> int:
    sampling = row.sampling
    if sampling.top_k:
        ids = np.sort(_best(values, sampling.top_k))
    else:
        ids = np.arange(len(values))
    chosen = values[ids].astype(np.float64)
    with np.errstate(over="ignore"):  # a tiny temperature makes all but the best -inf, as it should
        weights = np.exp((chosen - chosen.max()) / sampling.temperature)
    if sampling.top_p < 1.0:
        kept = _nucleus(weights, sampling.top_p)
        ids, weights = ids[kept], weights[kept]
    cumulative = weights.cumsum()
    index = int(np.searchsorted(cumulative, _uniform(sampling.seed, row.position) * cumulative[-1], side="right"))
    return int(ids[min(index, int(np.flatnonzero(weights)[-1]))])  # rounding may reach the end


def _nucleus(weights: NDArray[np.float64], top_p: float) -> NDArray[np.intp]:
    """Return the indices, ascending, of the fewest largest weights that hold `top_p` of the sum; at least one."""
    total = weights.sum()
    # Weights below total * (1 - top_p) / n hold less than 1 - top_p together, so none of them is in the nucleus:
    # leaving them out first (with a margin for rounding) makes the sort short.
    candidates = np.flatnonzero(weights >= 0.5 * total * (1.0 - top_p) / len(weights))
    order = candidates[np.argsort(-weights[candidates], kind="stable")]
    num_kept = int(np.searchsorted(weights[order].cumsum(), top_p * total, side="left")) + 1
    return np.sort(order[:num_kept])


def _best(values: NDArray[np.float32], count: int) -> NDArray[np.intp]:
    """Return the ids of the `count` largest values, best first, the lowest id of equals first."""
    count = min(count, len(values))
    threshold = np.partition(values, len(values) - count)[len(values) - count]
    candidates = np.flatnonzero(values >= threshold)
    return candidates[np.argsort(-values[candidates], kind="stable")][:count]


def _log_softmax(values: NDArray[np.float32]) -> NDArray[np.float64]:
    logprobs: NDArray[np.float64] = values.astype(np.float64) - values.max()
    logprobs -= np.log(np.exp(logprobs).sum())
    return logprobs


def _uniform(seed: int, position: int) -> float:
    """Return the number in [0, 1) that belongs to (seed, position): the first of a Philox stream with that key."""
    bits = np.random.Philox(key=np.array([seed, position], dtype=np.uint64)).random_raw()
    return float(int(bits) >> 11) * 2.0**-53

"""What the engine knows of one step: who computes what, the tokens that came of it, and where the time went."""

from __future__ import annotations

from dataclasses import dataclass

from pdactors.engine.batch import StepBatch
from pdactors.engine.sampling import Sampled, SampleRow
from pdactors.engine.sequence import Sequence
from pdactors.messages import FinishReason


@dataclass(frozen=True)
class Step:
    """A planned step: what each sequence computes, and what the model needs for it."""

    portions: list[tuple[Sequence, int]]
    batch: StepBatch
    sampled: list[Sequence]  # those that get a token, in the order of the logit rows
    rows: list[SampleRow]

    @property
    def num_kv_tokens(self) -> int:
        """Tokens whose KV the step reads."""
        return sum(span.context_len for span in self.batch.spans)

    @property
    def is_decode(self) -> bool:
        """Whether every sequence computes one token only."""
        return len(self.batch.input_ids) == len(self.portions)


@dataclass(frozen=True)
class StepResult:
    """The tokens, in the order of `Step.sampled`, and where the time went."""

    tokens: list[Sampled]
    duration_s: float
    attention_s: float
    sampling_s: float


@dataclass(frozen=True)
class Outcome:
    """A sequence got a token; `finish` says whether it was the last one."""

    sequence: Sequence
    sampled: Sampled
    finish: FinishReason | None

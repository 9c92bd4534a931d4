"""The default model in bfloat16, teacher-forced, against transformers in both dtypes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from pdactors.bench.prompts import make_prompts
from pdactors.engine.batch import Span, StepBatch
from pdactors.engine.load import load_model
from pdactors.text.tokenizer import Tokenizer

LENGTH, NUM_PROMPTS = 500, 4


@pytest.mark.slow
def test_the_best_token_is_nearly_always_that_of_the_exact_model(real_model: Path) -> None:
    model = load_model(real_model, "bfloat16", way="lean")
    exact, rounded = (
        AutoModelForCausalLM.from_pretrained(real_model, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)
    )
    layout = model.layout_for(32)
    model.bind(np.zeros((layout.num_blocks(LENGTH), layout.block_bytes), np.uint8), layout)
    ours = theirs = 0
    for prompt in make_prompts(Tokenizer(real_model), NUM_PROMPTS, min_tokens=LENGTH, max_tokens=LENGTH, seed=1):
        span = Span(0, LENGTH, LENGTH, range(layout.num_blocks(LENGTH)))
        best = model.forward(StepBatch(prompt, range(LENGTH), [span], range(LENGTH))).argmax(-1)
        with torch.inference_mode():
            tokens = torch.tensor([prompt])
            right = exact(tokens).logits[0].argmax(-1)
            theirs += int((rounded(tokens).logits[0].argmax(-1) == right).sum())
        ours += int((best == right).sum())
    assert ours >= 0.975 * LENGTH * NUM_PROMPTS
    assert ours >= theirs

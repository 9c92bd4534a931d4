from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from pdactors.engine import load, warming
from pdactors.engine.batch import Span, StepBatch
from pdactors.engine.warming import WarmingModel
from pdactors.kernels import warm


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(3)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        vocab_size=64,
        max_position_embeddings=128,
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    return tmp_path


def step(begin: int, end: int) -> StepBatch:
    return StepBatch(range(begin, end), range(begin, end), [Span(0, end - begin, end, [1, 0])], [end - begin - 1])


def test_a_sequence_goes_on_when_the_kernels_are_there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    is_warm, started = [False], []
    monkeypatch.setattr(warm, "is_warm", lambda dtype: is_warm[0])
    monkeypatch.setattr(load, "start_compiling", started.append)
    model = load.load_model(folder, "float32")
    assert isinstance(model, WarmingModel)
    assert started == ["float32"]
    assert model.description == "transformers: our kernels are being compiled"
    expected = load.load_model(folder, "float32", way="transformers")
    layout = model.layout_for(32)
    for each in (model, expected):
        each.bind(np.full((2, layout.block_bytes), 0xFF, np.uint8), layout)
    for number, (begin, end) in enumerate(((0, 20), (20, 21), (21, 50), (50, 51))):
        is_warm[0] = number >= 2
        found = model.forward(step(begin, end))
        torch.testing.assert_close(found, expected.forward(step(begin, end)), rtol=1e-4, atol=1e-4)
        paid = model.observe(step(begin, end)), expected.observe(step(begin, end))
        np.testing.assert_allclose(*paid, rtol=1e-3, atol=1e-4)
        assert model.way == ("lean" if is_warm[0] else "transformers")
    assert model.reason == ""
    model.close()


def test_loading_says_how_far_it_is(folder: Path) -> None:
    seen = []
    load.load_model(folder, "float32", way="lean", progress=lambda *step: seen.append(step))
    assert seen == [("load the weights", 0, 2), ("load the weights", 1, 2)]


def test_the_compiler_is_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    commands = []

    class Process:
        def __init__(self, command: list[str], **options: object) -> None:
            commands.append(command[1:])

        def wait(self) -> int:
            return 0

    monkeypatch.setattr(warming.subprocess, "Popen", Process)
    warming.start_compiling("bfloat16")
    assert commands == [["-m", "pdactors.engine.compiling", "bfloat16"]]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_was_compiled_is_found_again(dtype: str) -> None:
    warm.compile_all(dtype)
    assert warm.is_warm(dtype)
    assert not warm.is_warm("float16")

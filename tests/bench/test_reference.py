import json
import shutil
import subprocess
import sys

import msgspec
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from pdactors.bench.reference import TIE_MARGIN, Job, _expected, generate
from pdactors.errors import ModelError
from pdactors.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def prompts(tiny_model):
    tokenizer = Tokenizer(tiny_model)
    return tuple(tuple(tokenizer.encode(text)) for text in ("what is", "the cat sat on the mat and then", "the end~"))


@pytest.fixture(scope="module")
def expected(tiny_model, prompts):
    return run(tiny_model, prompts)


def run(model, prompts, **options):
    """Return what follows each prompt, in the order of the prompts."""
    return [one for _, one in sorted(generate(Job(str(model), "float32", prompts, **{"max_tokens": 6, **options})))]


def copy_of(model, folder, **settings):
    """Copy a model with more in its generation_config.json."""
    shutil.copytree(model, folder)
    path = folder / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    return folder


def test_it_is_what_the_model_finds_most_likely_token_by_token(tiny_model, prompts, expected):
    model = AutoModelForCausalLM.from_pretrained(tiny_model, attn_implementation="eager")
    for prompt, found in zip(prompts, expected, strict=True):
        tokens = list(prompt)
        for token_id, margin, rivals in zip(found.token_ids, found.margins, found.rivals, strict=True):
            with torch.no_grad():
                logits = model(torch.tensor([tokens]), use_cache=False).logits[0, -1]
            best, second = logits.topk(2).values.tolist()
            assert token_id == int(logits.argmax())
            assert margin == pytest.approx(best - second, abs=1e-4)
            assert bool(rivals) == (margin < TIE_MARGIN)
            tokens.append(token_id)


def test_an_answer_ends_with_its_end_or_at_the_limit(tiny_model, expected):
    eos = json.loads((tiny_model / "config.json").read_text())["eos_token_id"]
    assert [len(found.token_ids) for found in expected] == [6, 6, 1]
    assert expected[-1].token_ids == (eos,)


def test_a_batch_gives_what_each_prompt_gives_alone(tiny_model, prompts, expected):
    batched = run(tiny_model, (*prompts, (7,)), batch=3)
    for alone, found in zip(expected, batched[:3], strict=True):
        assert found.token_ids == alone.token_ids
        assert found.margins == pytest.approx(alone.margins, abs=1e-4)
    assert len(batched) == 4


def test_logits_that_only_rounding_tells_apart_are_rivals():
    logits = torch.tensor([[3.0, 1.0, 3.0, 2.9995, 2.0], [0.0, 5.0, 4.0, 4.998, 1.0]])
    found = _expected([0, 1], list(logits))
    assert found.rivals == ((2, 3), ())
    assert found.margins == pytest.approx((0.0, 0.002), abs=1e-5)


def test_only_the_ends_are_taken_from_the_models_own_generation_rules(tiny_model, tmp_path, prompts, expected):
    early = expected[0].token_ids[2]
    position = expected[0].token_ids.index(early)
    folder = copy_of(tiny_model, tmp_path / "ruled", repetition_penalty=50.0, eos_token_id=[early])
    first, _, last = run(folder, prompts)
    assert first.token_ids == expected[0].token_ids[: position + 1]
    assert last.token_ids == expected[-1].token_ids  # by the end that config.json names


def test_a_model_that_cannot_be_loaded_is_an_error_that_says_why(tiny_model, tmp_path):
    folder = shutil.copytree(tiny_model, tmp_path / "broken")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"after 0 of 1 prompts: OSError: .*model\.safetensors"):
        run(folder, ((1,),))


def test_the_process_ends_with_the_iterator(tiny_model):
    answers = generate(Job(str(tiny_model), "float32", ((5,),) * 1000, 6))
    before = {child.pid for child in psutil.Process().children()}
    next(answers)
    started = {child.pid for child in psutil.Process().children()} - before
    assert len(started) == 1
    answers.close()
    assert not started & {child.pid for child in psutil.Process().children()}


def test_the_reference_never_loads_paged_attention(tiny_model):
    job = msgspec.json.encode(Job(str(tiny_model), "float32", ((5,),), 1))
    code = (
        "import sys; from pdactors.bench.reference import main; main(); assert 'transformers' in sys.modules;"
        "sys.exit(any(name.startswith('pdactors.engine.') for name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], input=job, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr

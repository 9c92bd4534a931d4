from itertools import pairwise

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, processors

from pdactors.bench.prompts import make_prompts
from pdactors.errors import ModelError
from pdactors.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(tiny_model):
    return Tokenizer(tiny_model)


def common_tokens(one, other):
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def test_the_same_seed_gives_the_same_prompts_and_another_seed_others(tokenizer):
    first = make_prompts(tokenizer, 12, max_tokens=300, seed=1)
    assert make_prompts(tokenizer, 12, max_tokens=300, seed=1) == first
    assert make_prompts(tokenizer, 12, max_tokens=300, seed=2) != first


@pytest.mark.parametrize(("num_prompts", "max_tokens"), [(32, 1500), (5, 17), (9, 3)])
def test_lengths_are_spread_evenly_from_one_to_the_most(tokenizer, num_prompts, max_tokens):
    lengths = sorted(len(prompt) for prompt in make_prompts(tokenizer, num_prompts, max_tokens=max_tokens, seed=3))
    step = (max_tokens - 1) / (num_prompts - 1)
    assert (lengths[0], lengths[-1]) == (1, max_tokens)
    assert all(abs(b - a - step) <= 1 for a, b in pairwise(lengths))


def test_lengths_come_in_no_order(tokenizer):
    lengths = [len(prompt) for prompt in make_prompts(tokenizer, 32, max_tokens=1500, seed=1)]
    assert lengths not in (sorted(lengths), sorted(lengths, reverse=True))


def test_some_prompts_begin_alike_for_long_and_others_do_not(tokenizer):
    prompts = make_prompts(tokenizer, 12, max_tokens=600, seed=1)
    whole = max(prompts[1::3], key=len)
    for prompt in prompts[1::3]:
        assert whole[: len(prompt)] == prompt
    for prompt in prompts[2::3]:
        length = len(prompt) * 3 // 4
        assert common_tokens(prompt, whole) >= min(length, len(whole))
        assert common_tokens(prompt, whole) < len(whole) or len(prompt) < 40
    assert all(common_tokens(prompt, whole) < 40 for prompt in prompts[0::3])


def test_a_prompt_is_english(tokenizer):
    (prompt,) = make_prompts(tokenizer, 1, min_tokens=400, max_tokens=400, seed=1)
    text = tokenizer.decode(prompt)
    assert " the " in text
    assert text.isascii()


def test_a_beginning_of_sequence_stands_at_the_beginning_only(tmp_path):
    backend = tokenizers.Tokenizer(models.BPE({"<s>": 0, "a": 1, "e": 2}, [], unk_token="a"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens(["<s>"])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    backend.save(str(tmp_path / "tokenizer.json"))
    for prompt in make_prompts(Tokenizer(tmp_path), 9, max_tokens=50, seed=1):
        assert prompt[0] == 0
        assert 0 not in prompt[1:]


def test_a_tokenizer_that_knows_no_english_is_refused(tmp_path):
    tokenizers.Tokenizer(models.BPE({"日": 0}, [])).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ModelError, match="makes only 0 tokens"):
        make_prompts(Tokenizer(tmp_path), 2, max_tokens=10, seed=1)

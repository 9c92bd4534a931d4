"""Prompts for measurements and comparisons: token ids of made-up English, the same for the same seed."""

from __future__ import annotations

import random

from pdactors.errors import ModelError
from pdactors.text.tokenizer import Tokenizer

_MAX_DOUBLINGS = 6  # of the words that make up a prompt, for tokenizers that put several words into one token

_ADJECTIVES = "old small quiet bright heavy narrow famous empty careful northern early broken warm distant".split()
_NOUNS = (
    "engineer river lantern village station letter garden captain bridge market teacher winter harbour machine road "
    "library window mountain doctor forest kitchen railway painter island company ferry clock question"
).split()
_VERBS = "carried found repaired described followed painted crossed remembered measured opened sold visited".split()
_PLACES = "near behind beyond beside above under across towards".split()
_ENDINGS = (". ", ". ", ". ", ", and then ", "; ", "? ", "!\n", ".\n\n")


def make_prompts(
    tokenizer: Tokenizer, num_prompts: int, *, max_tokens: int, seed: int, min_tokens: int = 1
) -> list[tuple[int, ...]]:
    """Return prompts whose lengths are spread evenly over `min_tokens .. max_tokens`, in a shuffled order.

    Of every three, one is its own text; one is the beginning of a text that all prompts have in common; and one has
    three quarters of its length in common with that text, so that prefix caches are put to use.

    Raises:
        ModelError: the tokenizer makes next to no tokens of English words.
    """
    rng = random.Random(seed)  # noqa: S311 - nothing secret
    span = max_tokens - min_tokens
    lengths = [min_tokens + round(span * i / max(1, num_prompts - 1)) for i in range(num_prompts)]
    rng.shuffle(lengths)
    common = _tokens(tokenizer, f"{seed} common", max_tokens)
    prompts = []
    for i, length in enumerate(lengths):
        num_common = (0, length, length * 3 // 4)[i % 3]
        own = _tokens(tokenizer, f"{seed} {i}", length)
        if num_common:
            own = [token for token in own if token not in tokenizer.special_ids]
        prompts.append((*common[:num_common], *own[: length - num_common]))
    return prompts


def _tokens(tokenizer: Tokenizer, seed: str, count: int) -> list[int]:
    """Return the token ids of a text that belongs to `seed`, at least `count` of them beside the special ones."""
    num_sentences = count // 8 + 2
    for _ in range(_MAX_DOUBLINGS):
        ids = tokenizer.encode(_text(seed, num_sentences))
        if sum(token not in tokenizer.special_ids for token in ids) >= count:
            return ids
        num_sentences *= 2
    raise ModelError(f"the tokenizer makes only {len(ids)} tokens of {num_sentences // 2} sentences")


def _text(seed: str, num_sentences: int) -> str:
    rng = random.Random(seed)  # noqa: S311 - nothing secret
    return "".join(_sentence(rng) for _ in range(num_sentences))


def _sentence(rng: random.Random) -> str:
    def thing() -> str:
        words = [rng.choice(("the", "a", "every", "that")), rng.choice(_NOUNS)]
        if rng.random() < 0.5:
            words.insert(1, rng.choice(_ADJECTIVES))
        return " ".join(words)

    words = [thing(), rng.choice(_VERBS), thing()]
    if rng.random() < 0.6:
        words += [rng.choice(_PLACES), thing()]
    if rng.random() < 0.15:
        words += ["in", str(rng.randrange(1700, 2000))]
    text = " ".join(words)
    return text[0].upper() + text[1:] + rng.choice(_ENDINGS)

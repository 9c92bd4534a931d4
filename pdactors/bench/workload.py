"""What a load asks: kinds of requests, mixes of them, and when they arrive. The same for the same seed. Pure."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from msgspec import Struct
from msgspec.structs import replace

Source = Callable[[str], "Iterator[Request]"]  # the requests that belong to a seed


class Request(Struct, frozen=True):
    """One request of a load; an open loop sends it `at_s` seconds after its beginning."""

    kind: str
    prompt: tuple[int, ...]
    max_tokens: int
    at_s: float = 0.0


@dataclass(frozen=True)
class Kind:
    """Requests that are alike. Lengths are drawn evenly between the fewest and the most tokens, both included."""

    name: str
    prompt_tokens: tuple[int, int]
    answer_tokens: tuple[int, int]

    @property
    def most_tokens(self) -> int:
        """The longest sequence, prompt and answer."""
        return self.prompt_tokens[1] + self.answer_tokens[1]


CHAT = Kind("chat", (96, 160), (64, 64))
LONG = Kind("long", (2000, 2000), (16, 16))
THINKING = Kind("thinking", (64, 499), (448, 576))
WORKLOADS: dict[str, tuple[Kind, ...]] = {
    "chat": (CHAT,),
    "long": (LONG,),
    "thinking": (THINKING,),
    "mixed": (CHAT, CHAT, CHAT, CHAT, LONG),
}


def lengths(text: str) -> Kind:
    """Read `PROMPT:ANSWER`, each a number of tokens or `FEWEST-MOST`; raises ValueError that says what is wrong."""
    parts = [part.split("-") for part in text.split(":")]
    if len(parts) != 2 or not all(
        len(part) in (1, 2) and all(n.isascii() and n.isdecimal() for n in part) for part in parts
    ):
        raise ValueError(f"{text!r}: write PROMPT:ANSWER in tokens, as in 1000:200 or 64-499:2000-10000")
    prompt, answer = ((int(part[0]), int(part[-1])) for part in parts)
    if not (1 <= prompt[0] <= prompt[1] and 1 <= answer[0] <= answer[1]):
        raise ValueError(f"{text!r}: numbers of tokens are at least 1, the fewest first")
    return Kind(text, prompt, answer)


def make_requests(mix: Sequence[Kind], vocabulary: Sequence[int], seed: str) -> Iterator[Request]:
    """Yield requests without end: each run of `len(mix)` of them is the mix in a new order. No two prompts are alike.

    Prompts are tokens of `vocabulary` at random: engines take as long for them as for text, and no cache knows them.
    """
    rng = random.Random(f"{seed} requests")  # noqa: S311 - nothing secret
    while True:
        for kind in rng.sample(mix, len(mix)):
            prompt = tuple(rng.choices(vocabulary, k=rng.randint(*kind.prompt_tokens)))
            yield Request(kind.name, prompt, rng.randint(*kind.answer_tokens))


def arrive(requests: Iterator[Request], rate: float, seed: str) -> Iterator[Request]:
    """Have the requests arrive as a Poisson process of `rate` a second.

    Another rate stretches the same arrivals, so that rates differ in nothing else.
    """
    rng = random.Random(f"{seed} arrivals")  # noqa: S311 - nothing secret
    at = 0.0
    for request in requests:
        at += rng.expovariate(1.0)
        yield replace(request, at_s=at / rate)

from __future__ import annotations

from collections import Counter
from itertools import islice, pairwise

import pytest

from pdactors.bench.workload import WORKLOADS, Kind, Request, arrive, make_requests

VOCABULARY = range(10, 400)


def made(workload: str, count: int, seed: str = "1") -> list[Request]:
    return list(islice(make_requests(WORKLOADS[workload], VOCABULARY, seed), count))


@pytest.mark.parametrize("workload", WORKLOADS)
def test_the_same_seed_gives_the_same_requests_and_another_one_others(workload):
    assert made(workload, 10) == made(workload, 10)
    prompts = [request.prompt for seed in "12" for request in made(workload, 10, seed)]
    assert len({prompt[:32] for prompt in prompts}) == 20


@pytest.mark.parametrize(
    ("workload", "prompt", "answer"),
    [("chat", (96, 160), (64, 64)), ("long", (2000, 2000), (16, 16)), ("thinking", (1, 499), (448, 576))],
)
def test_lengths_are_what_the_workload_is_known_for(workload, prompt, answer):
    for request in made(workload, 50):
        assert request.kind == workload
        assert prompt[0] <= len(request.prompt) <= prompt[1]
        assert answer[0] <= request.max_tokens <= answer[1]
        assert set(request.prompt) <= set(VOCABULARY)


def test_every_fifth_of_a_mix_is_long_and_they_are_spread():
    kinds = [request.kind for request in made("mixed", 500)]
    assert all(Counter(kinds[i : i + 5]) == {"chat": 4, "long": 1} for i in range(0, 500, 5))
    assert len({kinds[i : i + 5].index("long") for i in range(0, 500, 5)}) == 5


def test_arrivals_have_the_rate_and_the_spread_of_a_poisson_process():
    requests = list(arrive(iter(made("chat", 1) * 20_000), 4.0, "1"))
    gaps = [b.at_s - a.at_s for a, b in pairwise(requests)]
    mean = sum(gaps) / len(gaps)
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert mean == pytest.approx(0.25, rel=0.03)
    assert deviation == pytest.approx(mean, rel=0.05)
    assert min(gaps) >= 0


def test_another_rate_stretches_the_same_arrivals():
    slow, fast = (list(arrive(iter(made("chat", 20)), rate, "1")) for rate in (1.0, 5.0))
    assert [request.at_s for request in slow] == pytest.approx([request.at_s * 5 for request in fast])
    assert [request.prompt for request in slow] == [request.prompt for request in fast]


def test_the_longest_sequence_of_a_kind_is_prompt_and_answer():
    assert Kind("x", (1, 20), (2, 30)).most_tokens == 50

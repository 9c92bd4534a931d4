"""Where answers begin, change hands and end: the same tokens and text in every mode as in a single process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from pdactors import Client, Cluster
from pdactors.text.tokenizer import Tokenizer

MakeIds = Callable[[object, int], list[int]]
Modes = dict[str, Cluster]
Single = Callable[..., list[int]]
SEPARATE = "🎉"  # a stop string that takes several tokens of the real model
ECHOES = [
    "Repeat: 😀🎉🚀 日本語\nRepeat: 😀🎉🚀 日本語\nRepeat:",
    "东京 = 东京, 日本 = 日本, 中文 = 中文, 东京 =",
    "👩‍👩‍👧 café naïve 👩‍👩‍👧 café naïve 👩‍👩‍👧",
]


@pytest.fixture(scope="module")
def modes(session_cluster: Cluster, start: Callable[..., AbstractContextManager[Cluster]]) -> Iterator[Modes]:
    """Each mode on the tiny model in float32, with prompts in chunks of 48 tokens but in one."""
    with ExitStack() as stack:
        others = {
            mode: stack.enter_context(start(**{"cluster.mode": mode, "engine.chunk_tokens": 48}))
            for mode in ("chunked", "colocated")
        }
        yield {"disaggregated": session_cluster, **others}


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Tokenizer:
    return Tokenizer(tiny_model)


@pytest.fixture(scope="module")
def single(tiny_model: Path) -> Single:
    """Greedy tokens of transformers' `generate` in this process: `single(prompt_ids, max_tokens, min_tokens)`."""
    model = LlamaForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()

    def generate(prompt: list[int], max_tokens: int, min_tokens: int = 0) -> list[int]:
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            output = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_tokens,
                min_new_tokens=min_tokens,
                do_sample=False,
                pad_token_id=model.config.eos_token_id,
            )
        return [int(token) for token in output[0, len(prompt) :]]

    return generate


@dataclass
class Case:
    """A request, and what must come of it; `text` None: that of all its tokens."""

    fields: dict[str, Any]
    wanted: list[int]
    finish: str
    text: str | None = None


def _events(line: Any, requests: dict[str, dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Send all at once; return each one's events once the server has closed, so that none can come later."""
    for name, fields in requests.items():
        line.send({"id": name, **fields})
    events: dict[str, list[dict[str, Any]]] = {name: [] for name in requests}
    while not all(found and found[-1]["event"] != "token" for found in events.values()):
        event = line.event()
        events[event["id"]].append(event)
    line.end_input()
    assert line.rest() == b""
    return events


def _cases(tokenizer: Tokenizer, single: Single, make_ids: MakeIds) -> dict[str, Case]:
    (eos,) = tokenizer.encode("<|im_end|>")
    end, loop, long = tokenizer.encode("~"), tokenizer.encode("^"), make_ids("long", 333)

    def to_the_end(prompt: list[int], max_tokens: int, min_tokens: int = 0) -> Case:
        wanted = single(prompt, max_tokens, min_tokens)
        fields = {"prompt_token_ids": prompt, "max_tokens": max_tokens, "min_tokens": min_tokens}
        return Case(fields, wanted, "stop" if wanted[-1] == eos else "length")

    def stopped(stop: str | list[str], num_tokens: int) -> Case:
        return Case({"prompt": "^", "max_tokens": 9, "stop": stop}, single(loop, num_tokens), "stop", "")

    cases = {
        "eos first": to_the_end(end, 9),
        "eos first and ignored": Case({"prompt": "~", "max_tokens": 1, "ignore_eos": True}, [eos], "length", ""),
        "max_tokens 1": to_the_end(long, 1),
        "max_tokens 1 and eos": to_the_end(end, 1),
        "max_tokens 2": to_the_end(long, 2),
        "eos banned by min_tokens": to_the_end(end, 7, 5),
        "eos banned to the end": to_the_end(end, 3, 3),
        "one token": to_the_end([300], 40),
        "a block less one": to_the_end(long[:31], 40),
        "a block": to_the_end(long[:32], 40),
        "a block and one": to_the_end(long[:33], 40),
        "stop across the hand-over": stopped("\n.", 2),
        "stop in the first token": stopped(["z", "\n"], 1),
        "stop inside a token": _stop_inside(tokenizer, single, make_ids),
        "no stop": Case({"prompt": "^", "max_tokens": 8, "stop": "\n.\n\n"}, single(loop, 8), "length", "\n." * 4),
    }
    assert cases["eos first"].wanted == cases["max_tokens 1 and eos"].wanted == [eos]
    assert len(cases["eos banned by min_tokens"].wanted) > 5
    return cases


def _stop_inside(tokenizer: Tokenizer, single: Single, make_ids: MakeIds) -> Case:
    """Find a prompt whose answer has a token with a middle character that does not occur before it."""
    for seed in range(5, 60):
        prompt = make_ids(("inside", seed), 20)
        answer = single(prompt, 30)
        for i, token in enumerate(answer[:-1]):
            piece, before = tokenizer.decode([token]), tokenizer.decode(answer[:i])
            if i > 1 and len(piece) >= 3 and piece.isascii() and piece[1] not in before + piece[0]:
                fields = {"prompt_token_ids": prompt, "max_tokens": 30, "stop": piece[1]}
                return Case(fields, answer[: i + 1], "stop", before + piece[0])
    raise AssertionError("no such token")


def test_every_seam_is_as_in_a_single_process(
    modes: Modes, tokenizer: Tokenizer, single: Single, make_ids: MakeIds, dial: Any, settled: Any
) -> None:
    """Exactly one end for each, tokens in order, and none after the end."""
    cases = _cases(tokenizer, single, make_ids)
    for mode, cluster in modes.items():
        events = _events(dial(cluster.tcp), {name: case.fields for name, case in cases.items()})
        for name, case in cases.items():
            *tokens, end = events[name]
            where = f"{mode}, {name}: {events[name]}"
            assert [token["event"] for token in tokens] == ["token"] * len(tokens), where
            assert [token["index"] for token in tokens] == list(range(len(tokens))), where
            assert [token["token_id"] for token in tokens] == case.wanted, where
            text = tokenizer.decode(case.wanted) if case.text is None else case.text
            assert "".join(token["text"] for token in tokens) == text, where
            assert (end["event"], end["finish_reason"]) == ("done", case.finish), where
            assert end["usage"]["completion_tokens"] == len(case.wanted), where
        settled(cluster)


def test_errors_are_ends_too_and_there_is_one(modes: Modes, dial: Any, settled: Any) -> None:
    wrong: dict[str, dict[str, Any]] = {
        "empty": {"prompt": ""},
        "too long": {"prompt_token_ids": [300] * 2048},
        "late": {"prompt": "^", "max_tokens": 1900, "ignore_eos": True, "deadline_ms": 60},
        "min above max": {"prompt": "^", "max_tokens": 3, "min_tokens": 4},
        "right": {"prompt": "^", "max_tokens": 3},
    }
    for cluster in modes.values():
        events = _events(dial(cluster.tcp), wrong)
        ends = {
            name: [event.get("code") for event in found if event["event"] != "token"] for name, found in events.items()
        }
        assert ends == {
            "empty": ["bad_request"],
            "too long": ["prompt_too_long"],
            "late": ["timeout"],
            "min above max": ["bad_request"],
            "right": [None],
        }
        settled(cluster)


def test_a_seed_gives_the_same_tokens_in_every_mode_and_beside_others(
    modes: Modes, dial: Any, make_ids: MakeIds
) -> None:
    hot = [
        {"temperature": 1.0},
        {"temperature": 1.3, "top_k": 12},
        {"temperature": 0.8, "top_p": 0.7},
        {"temperature": 2.0, "top_k": 40, "top_p": 0.95, "min_tokens": 30, "logprobs": 2},
    ]
    requests = {
        f"{i}, seed {seed}": {"prompt_token_ids": make_ids(i, 20 + 31 * i), "max_tokens": 60, "seed": seed, **options}
        for i, options in enumerate(hot)
        for seed in (1, 2**63 - 1)
    }
    found = {}
    for mode, cluster in modes.items():
        events = _events(dial(cluster.tcp), requests)
        found[mode] = {name: [e["token_id"] for e in es if e["event"] == "token"] for name, es in events.items()}
    assert found["chunked"] == found["disaggregated"]
    assert found["colocated"] == found["disaggregated"]
    assert Counter(map(tuple, found["chunked"].values())).most_common(1)[0][1] == 1
    with Client(modes["disaggregated"].zmq) as client:
        name, fields = next(iter(requests.items()))
        assert list(client.generate(**fields).token_ids) == found["disaggregated"][name]


# ---- The real model --------


@pytest.fixture(scope="module")
def real_tokenizer(real_model: Path) -> Tokenizer:
    return Tokenizer(real_model)


@pytest.fixture(scope="module")
def echoed(real_model: Path, real_tokenizer: Tokenizer, transformers_says: Any) -> list[list[int]]:
    """What transformers answers to ECHOES."""
    prompts = [real_tokenizer.encode(prompt) for prompt in ECHOES]
    return [list(answer.token_ids) for answer in transformers_says(real_model, prompts, 24)]


def test_characters_of_several_tokens_come_out_whole(
    real: Cluster, real_tokenizer: Tokenizer, echoed: list[list[int]], dial: Any, settled: Any
) -> None:
    line = dial(real.tcp, timeout_s=60.0)
    texts = []
    for prompt, wanted in zip(ECHOES, echoed, strict=True):
        answer = line.ask(prompt=prompt, max_tokens=24)
        assert answer.ids == wanted
        assert answer.text == real_tokenizer.decode(wanted)
        assert all("\ufffd" not in token["text"] for token in answer.tokens[:-1])
        texts.append(answer.text)
    assert SEPARATE in texts[0]
    assert "日本" in texts[0] + texts[1]
    stopped = line.ask(prompt=ECHOES[0], max_tokens=24, stop=[SEPARATE])
    assert (stopped.text, stopped.end["finish_reason"]) == (texts[0].split(SEPARATE)[0], "stop")
    assert stopped.ids == echoed[0][: len(stopped.ids)]
    settled(real)

"""What `pdactors top` works out of two samples, and how it is laid out."""

from __future__ import annotations

from typing import Any

import pytest
from rich.console import Console

from pdactors.cli.top import Sample, figures, view, watch
from pdactors.errors import ConnectionLost, RequestTimeout

KV = {"total": 20482, "free": 0, "cached": 0, "used": 20000, "leased_out": 481, "leased_in": 0}
DECODE = {
    "name": "n0/decode-0", "role": "decode", "node": "n0", "state": "draining", "incarnation": 1, "running": 32,
    "waiting": 1024, "kv_blocks": KV, "step_ms": {"p50": 123.41, "p99": 4567.8}, "way": "lean", "busy_s": 10.0,
    "counts": {"sampled_tokens": 100}, "prompt_tokens_computed": 7,
}  # fmt: skip
MOVE = {"request": "a1b2c3d4e5f60718", "to": "n1/migrator", "codec": "int8", "num_blocks": 1500, "num_stored": 1200}
RECENT = {
    "request": "0123456789abcdef", "id": "\x1b[2J", "num_tokens": 1234, "prompt_tokens": 30000, "cached_tokens": 29000,
    "end": "worker_lost", "path": "cuda_ipc", "codec": "int8", "ttft_ms": 12345.6, "total_ms": 98765.4,
}  # fmt: skip


def actor(name: str, role: str, **fields: Any) -> dict[str, Any]:
    plain = {
        "counts": {},
        "way": "",
        "busy_s": 0.0,
        "step_ms": {"p50": 0.0, "p99": 0.0},
        "kv_blocks": {**KV, "total": 0},
    }
    return {**DECODE, **plain, "name": name, "role": role, "state": "ready", **fields}


def sample(at_s: float, *actors: dict[str, Any], recent: Any = (RECENT,)) -> Sample:
    status = {"run_id": "9f8e7d6c", "mode": "disaggregated", "model": "m", "requests": 41, "silent": ["n1/decode-0"]}
    return Sample(at_s, {**status, "actors": list(actors)}, list(recent))


def busy() -> dict[str, Any]:
    """Two seconds in which decode sampled 300 tokens, and a transfer went on."""
    router = actor("router", "router", waiting=9)
    gateway = actor("gateway", "gateway", counts={"prompt_tokens": 5, "generated_tokens": 10})
    later = actor("gateway", "gateway", counts={"prompt_tokens": 205, "generated_tokens": 310})
    then = {**DECODE, "busy_s": 11.5, "counts": {"sampled_tokens": 400}}
    moves = [actor("n0/migrator", "migrator", moves=[{**MOVE, "num_bytes": size}]) for size in (3_000_000, 90_000_000)]
    return figures(sample(5.0, router, gateway, DECODE, moves[0]), sample(7.0, router, later, then, moves[1]))


def of(found: dict[str, Any], name: str) -> dict[str, Any]:
    (each,) = [each for each in found["actors"] if each["name"] == name]
    return each


def test_rates_are_what_grew_in_a_second() -> None:
    found = busy()
    assert of(found, "n0/decode-0").items() >= {"busy": 0.75, "tokens_s": 150.0, "prompt_tokens_s": 0.0}.items()
    assert of(found, "gateway").items() >= {"busy": None, "tokens_s": 150.0, "prompt_tokens_s": 100.0}.items()
    assert of(found, "router").items() >= {"busy": None, "tokens_s": None, "waiting": 9}.items()
    (move,) = found["moves"]
    assert (move["from"], move["mb_s"]) == ("n0/migrator", 43.5)


def test_a_successor_has_no_rates_yet() -> None:
    successor = {**DECODE, "incarnation": 2, "busy_s": 0.1, "counts": {}}
    found = of(figures(sample(5.0, DECODE), sample(7.0, successor)), "n0/decode-0")
    assert (found["busy"], found["tokens_s"]) == (None, None)


def test_no_number_is_cut_in_80_columns(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    Console().print(view(busy()))
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80, text
    shown = "9f8e7d6c 75% 32 1024 20481/20482 123 4568 150 1200/1500 90.0 43.5 int8 30000 29000 1234 12346 98765"
    for part in [*shown.split(), "41 requests", "9 queued", "draining", "n1/decode-0 did not answer"]:
        assert part in text, (part, text)
    assert "\x1b" not in text


def test_requests_that_have_not_ended_are_shown_and_a_low_terminal_shows_fewer() -> None:
    begun = {"request": "fedcba9876543210", "num_tokens": 3, "received_s": 1.0}
    found = figures(sample(5.0, DECODE), sample(7.0, DECODE, recent=[begun, *[RECENT] * 20]))
    console = Console(width=80)
    with console.capture() as taken:
        console.print(view(found, height=16))
    assert "under way" in taken.get()
    assert taken.get().count("0123456789abcdef") == 2
    assert taken.get().count("\n") <= 16


class Asked:
    """A client whose cluster answers what it is given to answer."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)

    def status(self) -> Any:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer.status

    def requests(self) -> list[Any]:
        return []


def test_while_there_is_no_router_the_last_figures_stand_with_what_is_wrong() -> None:
    asked = Asked(*[sample(0.0, DECODE)] * 2, RequestTimeout("no answer"), sample(0.0, DECODE), ConnectionLost("over"))
    found = watch(asked, 0.001)  # type: ignore[arg-type]
    first, second, third = next(found), next(found), next(found)
    assert second == {**first, "wrong": "no answer"}
    assert "wrong" not in third
    with pytest.raises(ConnectionLost):
        next(found)

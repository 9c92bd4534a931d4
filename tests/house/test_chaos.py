"""`pdactors chaos`: what it says of a cluster that it hurts, and of answers that are wrong."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from pdactors.bench import chaos as module
from pdactors.bench.chaos import Chaos, _Run
from pdactors.client_messages import TokenEvent
from pdactors.errors import PDError, RequestTimeout, WorkerLost

QUICK = {"router.heartbeat_ms": 200, "router.dead_after_ms": 1500}


@pytest.mark.slow
@pytest.mark.parametrize("keys", [{"node.0.decode": 2}, {"cluster.mode": "chunked"}], ids=["disaggregated", "chunked"])
def test_every_answer_is_right_or_clearly_an_error(
    home: Path, tiny_settings: Callable[..., list[str]], keys: dict[str, object]
) -> None:
    command = [sys.executable, "-m", "pdactors.cli.main", "chaos", "--minutes", "0.3", "--json"]
    done = subprocess.run([*command, *tiny_settings(**QUICK, **keys)], capture_output=True, check=False, timeout=280)
    found = json.loads(done.stdout)
    assert (found["wrong"], found["hung"], found["leaked"], found["faults"]) == (0, 0, 0, []), done.stderr.decode()
    assert done.returncode == 0
    assert f"seed {found['seed']}\n" in done.stderr.decode()
    counts = ("right", "left", "clear_errors", "wrong", "hung")
    assert found["requests"] == sum(found[count] for count in counts)
    assert found["right"] > 20
    assert len(found["events"]) >= 2
    assert not subprocess.run([sys.executable, "-m", "pdactors.cli.main", "leaks"], check=False).returncode


class Fake:
    """Stands for a client whose stream is what the test says."""

    def __init__(self, *events: Any) -> None:
        self.events_ = events

    def __call__(self, *_: Any, **__: Any) -> Fake:
        return self

    async def __aenter__(self) -> Fake:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def events(self, **_: Any) -> AsyncIterator[Any]:
        for event in self.events_:
            if isinstance(event, Exception):
                raise event
            if event is None:
                await asyncio.Event().wait()
            yield event


def token(index: int, token_id: int) -> TokenEvent:
    return TokenEvent(1, index, token_id, "x")


@pytest.mark.parametrize(
    ("events", "what"),
    [
        ((token(0, 5), token(1, 6)), "right"),
        ((token(0, 5), token(1, 7)), "wrong"),
        ((token(0, 5), token(0, 5), token(1, 6)), "wrong"),
        ((token(0, 5),), "wrong"),
        ((token(0, 5), WorkerLost("gone")), "clear_errors"),
        ((token(0, 6), WorkerLost("gone")), "wrong"),
        ((token(0, 5), PDError("what?")), "wrong"),
        ((RequestTimeout("late"),), "clear_errors"),
        ((token(0, 5), None), "hung"),
    ],
)
async def test_what_becomes_of_a_request_is_counted_as_what_it_is(
    monkeypatch: pytest.MonkeyPatch, events: tuple[Any, ...], what: str
) -> None:
    monkeypatch.setattr(module, "AsyncClient", Fake(*events))
    monkeypatch.setattr(module, "PATIENCE_S", 0.02)
    monkeypatch.setattr(module, "LEFT_SHARE", 0.0)
    run = _Run("", "", 1, [{}], lambda *_: None)
    run._right = [[(5, "x"), (6, "x")]]
    await run._ask(0)
    found = run.result
    assert (found.requests, getattr(found, what)) == (1, 1)
    assert found.is_good == (what in ("right", "clear_errors"))


def test_what_leaks_is_bad() -> None:
    assert not Chaos(1, leaked=1).is_good

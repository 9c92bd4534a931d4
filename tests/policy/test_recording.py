"""Recordings of a router: put to the policies again, they lead to the same decisions; anything else is refused."""

from __future__ import annotations

import inspect

import pytest

from pdactors.errors import BadRequest
from pdactors.messages import Cancel, Generate, Load, Member, Prefill, Release, Sampling
from pdactors.policy.admission import Limits
from pdactors.policy.dispatch import Dispatcher
from pdactors.policy.recording import STIMULI, Stimulus, read, record
from pdactors.token_ids import TokenIds

WORKER = Member("w", "worker", "n0", "r0", 1, 1, state="ready")


def recording() -> list[bytes]:
    lines: list[bytes] = []
    dispatcher = Dispatcher(Limits(16, 100, 4, 60.0, b"key"))
    record(dispatcher, lines.append)
    dispatcher.joined(WORKER, Load(max_sequences=2), 1.0)
    dispatcher.generate("gateway", Generate("a", TokenIds.of((1, 2)), Sampling()), 2.0)
    dispatcher.cancel(Cancel("a"), 3.0)
    return lines


def test_calls_are_written_with_what_came_of_them():
    limits, stimuli = read(recording())
    assert limits == Limits(16, 100, 4, 60.0, b"key")
    assert [(s.kind, s.now, s.name) for s in stimuli] == [
        ("joined", 1.0, ""),
        ("generate", 2.0, "gateway"),
        ("cancel", 3.0, ""),
    ]
    assert stimuli[0].member == WORKER
    orders = [(to, type(message)) for s in stimuli for to, message in s.orders]
    assert orders == [("w", Prefill), ("w", Release)]


def test_every_call_that_returns_orders_is_recorded():
    public = {name: method for name, method in vars(Dispatcher).items() if not name.startswith("_")}
    deciding = {name for name, method in public.items() if "Order" in str(inspect.signature(method).return_annotation)}
    assert {*deciding, "cache_changed"} == set(STIMULI)


def test_a_decision_that_differs_is_seen():
    limits, stimuli = read(recording())
    dispatcher = Dispatcher(limits)
    dispatcher.chooser.prefill = lambda request: None  # type: ignore[method-assign]
    assert [s.put_to(dispatcher) == s.orders for s in stimuli] == [True, False, False]


@pytest.mark.parametrize("lines", [[], [b"x"], [b"gA=="], [b"\xff"], [*recording(), b""]])
def test_what_is_no_recording_is_refused(lines):
    with pytest.raises(BadRequest):
        read(lines)


@pytest.mark.parametrize("kind", ["check", "__init__", "_end", "requests"])
def test_nothing_else_is_called(kind):
    with pytest.raises(BadRequest, match="never told"):
        Stimulus(kind).put_to(Dispatcher(Limits(16, 100, 4, 60.0, b"key")))

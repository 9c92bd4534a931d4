"""A supervisor that is told to retire what is gone already."""

from __future__ import annotations

import pytest

from pdactors.actors.process import Nursery
from pdactors.actors.supervisor import Supervisor
from pdactors.messages import Exited, Retire
from pdactors.transport.inproc import InprocTransport


@pytest.fixture
def supervisor(make_spec):
    children = [make_spec("decode", "n0/decode-0", incarnation=5)]
    return Supervisor(make_spec("supervisor"), InprocTransport(), children, Nursery("", "float32", 32, ()))


@pytest.fixture
def said(supervisor, monkeypatch):
    said = []
    monkeypatch.setattr(supervisor, "tell", lambda name, message: said.append((name, message)))
    return said


async def test_what_is_gone_is_said_to_be_gone_each_time(supervisor, said):
    """The router asks until it hears of the end, and the news of it may have been lost."""
    for _ in range(3):
        supervisor._on_retire(None, Retire("n0/decode-7", 9))
    assert said == [("router", Exited("n0/decode-7", 9, is_final=True))] * 3
    assert not supervisor.dropped


async def test_a_successor_is_not_retired_in_its_predecessors_place(supervisor, said):
    supervisor._on_retire(None, Retire("n0/decode-0", 4))
    assert said == []
    assert supervisor.dropped == {"retirement of the unknown": 1}
    assert not supervisor._children["n0/decode-0"].is_retired

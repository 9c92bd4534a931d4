"""How answers end at the gateway when clients leave and the router is lost; no process, no socket."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pdactors.actors.gateway import Gateway
from pdactors.client_messages import AnyEvent, DoneEvent, ErrorEvent, RequestBody, TokenEvent
from pdactors.messages import Cancel, Generate, Member, Message, Release, Token, Tokens
from pdactors.text.tokenizer import Tokenizer
from pdactors.transport.inproc import InprocTransport

DECODE = Member("n0/decode-0", "decode", "n0", "r0", 7, 1)


class Told(Gateway):
    """A gateway that keeps what it would send."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.told: list[tuple[str, Message]] = []

    def tell(self, name: str, message: Message) -> bool:
        self.told.append((name, message))
        return True


@pytest.fixture
def gateway(make_spec: Any, tiny_model: Path) -> Iterator[Told]:
    transport = InprocTransport()
    gateway = Told(make_spec("gateway"), transport)
    gateway.tokenizer = Tokenizer(tiny_model)
    gateway.welcomed(router(1))
    yield gateway
    transport.close()


def router(incarnation: int) -> Member:
    return Member("router", "router", "n0", "r0", 5, incarnation)


def ask(gateway: Told, **fields: Any) -> tuple[str, list[AnyEvent]]:
    events: list[AnyEvent] = []
    return gateway.submit(RequestBody(prompt_token_ids=(5, 6), **fields), None, events.append), events


def token(request: str, index: int, **fields: Any) -> Token:
    return Token(request, 1, index, 10 + index, **fields)


def test_a_client_that_leaves_during_the_last_token_costs_others_nothing(gateway: Told) -> None:
    """Its socket breaks while the token is written, so it is cancelled from within."""
    keys: list[str] = []

    def leave(event: AnyEvent) -> None:
        if isinstance(event, TokenEvent):
            gateway.cancel(keys[0])

    keys.append(gateway.submit(RequestBody(prompt_token_ids=(5,)), None, leave))
    other, events = ask(gateway)
    gateway._on_tokens(DECODE, Tokens((token(keys[0], 0, finish="stop"), token(other, 0, finish="length"))))
    assert not gateway.answers
    assert [type(event) for event in events] == [TokenEvent, DoneEvent]


def test_tokens_that_nobody_waits_for_are_stopped_where_they_come_from(gateway: Told) -> None:
    gateway._on_tokens(DECODE, Tokens((token("gone", 3),)))
    assert gateway.told == [("n0/decode-0", Release("gone", 1))]


def test_a_token_that_came_twice_is_dropped_and_stops_nothing(gateway: Told) -> None:
    request, events = ask(gateway)
    gateway.told.clear()
    gateway._on_tokens(DECODE, Tokens((token(request, 0), token(request, 0))))
    assert len(events) == 1
    assert gateway.told == []


def test_a_lost_router_takes_along_what_was_not_handed_over(gateway: Told) -> None:
    new, new_events = ask(gateway)
    prefilled, prefilled_events = ask(gateway)
    decoding, decoding_events = ask(gateway)
    ahead, ahead_events = ask(gateway)
    gateway._on_tokens(DECODE, Tokens((token(prefilled, 0), token(decoding, 0), token(decoding, 1), token(ahead, 1))))
    gateway.welcomed(router(1))  # it only lost the connection
    assert len(gateway.answers) == 4
    gateway.told.clear()
    gateway.welcomed(router(2))
    for events in (new_events, prefilled_events):
        assert isinstance(events[-1], ErrorEvent)
        assert events[-1].code == "worker_lost"
    assert gateway.told == [("router", Cancel(new)), ("router", Cancel(prefilled))]
    assert set(gateway.answers) == {decoding, ahead}
    gateway._on_tokens(DECODE, Tokens((token(decoding, 2, finish="length"),)))
    assert isinstance(decoding_events[-1], DoneEvent)
    assert not ahead_events


def test_the_first_router_takes_nothing_along(make_spec: Any, tiny_model: Path) -> None:
    transport = InprocTransport()
    gateway = Told(make_spec("gateway"), transport)
    gateway.tokenizer = Tokenizer(tiny_model)
    request, events = ask(gateway)
    gateway.welcomed(router(1))
    assert events == []
    assert isinstance(gateway.told[0][1], Generate)
    gateway.cancel(request)
    transport.close()

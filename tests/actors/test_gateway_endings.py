"""How answers end at the gateway when clients leave and the router is lost; no process, no socket."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from pdactors.actors.gateway import ROUTER_GONE_S, Gateway
from pdactors.client_messages import AnyEvent, DoneEvent, ErrorEvent, RequestBody, TokenEvent
from pdactors.messages import Cancel, Fleet, Generate, Member, Message, Release, Resume, Token, Tokens
from pdactors.policy.retries import MAX_ATTEMPTS
from pdactors.text.tokenizer import Tokenizer
from pdactors.token_ids import TokenIds
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
    yield gateway
    transport.close()


ROUTER = Member("router", "router", "n0", "r0", 5, 1)


def ask(gateway: Told, **fields: Any) -> tuple[str, list[AnyEvent]]:
    events: list[AnyEvent] = []
    return gateway.submit(RequestBody(prompt_token_ids=(5, 6), **fields), None, events.append), events


def token(request: str, index: int, attempt: int = 1, **fields: Any) -> Token:
    return Token(request, attempt, index, 10 + index, **fields)


def indices(events: list[AnyEvent]) -> list[int]:
    return [event.index for event in events if isinstance(event, TokenEvent)]


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


# ---- What is lost on the way --------


def test_the_router_is_told_what_the_client_has_and_earlier_attempts_are_late_from_then_on(gateway: Told) -> None:
    request, events = ask(gateway)
    gateway._on_tokens(DECODE, Tokens((token(request, 0), token(request, 1), token(request, 3))))
    gateway.told.clear()
    gateway._on_resume(ROUTER, Resume(request, 2))
    assert gateway.told == [("router", Resume(request, 2, TokenIds.of([10, 11])))]
    gateway.told.clear()
    gateway._on_tokens(DECODE, Tokens((token(request, 2),)))  # it is not dead, or this was under way
    assert gateway.told == [("n0/decode-0", Release(request, 1))]
    assert indices(events) == [0, 1]
    gateway._on_tokens(DECODE, Tokens((token(request, 2, 2), token(request, 3, 2, finish="stop"))))
    assert indices(events) == [0, 1, 2, 3]
    assert isinstance(events[-1], DoneEvent)
    assert events[-1].usage.completion_tokens == 4


def test_the_same_question_has_the_same_answer_and_an_old_one_none(gateway: Told) -> None:
    request, _ = ask(gateway)
    gateway.told.clear()
    for attempt in (3, 3, 2):
        gateway._on_resume(ROUTER, Resume(request, attempt))
    assert gateway.told == [("router", Resume(request, 3))] * 2
    assert gateway.dropped == {"late resumption": 1}


def test_what_ended_with_its_last_token_is_not_begun_again(gateway: Told) -> None:
    request, _ = ask(gateway)
    gateway._on_tokens(DECODE, Tokens((token(request, 0, finish="length"),)))
    gateway.told.clear()
    gateway._on_resume(ROUTER, Resume(request, 2))
    assert gateway.told == [("router", Cancel(request))]


def test_a_new_router_is_asked_for_the_rest_of_every_answer(gateway: Told) -> None:
    new, _ = ask(gateway, max_tokens=9)
    decoding, events = ask(gateway)
    gateway._on_tokens(DECODE, Tokens((token(decoding, 0), token(decoding, 1))))
    asked = {message.request: message for _, message in gateway.told if isinstance(message, Generate)}
    gateway.told.clear()
    gateway.router_changed()
    again = {message.request: message for _, message in gateway.told if isinstance(message, Generate)}
    assert again == {
        new: replace(asked[new], attempt=2),
        decoding: replace(asked[decoding], attempt=2, generated=TokenIds.of([10, 11])),
    }
    assert gateway.told[0] == ("router", Cancel(new)), "it may have come between the new one's start and its word"
    gateway._on_tokens(DECODE, Tokens((token(decoding, 2), token(decoding, 2, 2, finish="length"))))
    assert indices(events) == [0, 1, 2]
    assert isinstance(events[-1], DoneEvent)


def test_a_request_that_loses_one_router_after_the_other_is_given_up(gateway: Told) -> None:
    _, events = ask(gateway)
    for _ in range(MAX_ATTEMPTS):
        gateway.router_changed()
    assert [event.code for event in events if isinstance(event, ErrorEvent)] == ["worker_lost"]
    assert not gateway.answers


def test_what_stands_still_without_a_router_ends_and_what_decodes_goes_on(gateway: Told) -> None:
    now = 0.0
    gateway.clock = lambda: now
    gateway._on_fleet(ROUTER, Fleet("disaggregated", ()))
    _, waiting = ask(gateway)
    decoding, going_on = ask(gateway)
    now = ROUTER_GONE_S
    gateway._on_tokens(DECODE, Tokens((token(decoding, 0),)))
    gateway._sweep()
    assert not waiting
    now += 0.5
    gateway._sweep()
    assert [event.code for event in waiting if isinstance(event, ErrorEvent)] == ["worker_lost"]
    assert set(gateway.answers) == {decoding}
    now += ROUTER_GONE_S
    gateway._sweep()
    assert isinstance(going_on[-1], ErrorEvent)

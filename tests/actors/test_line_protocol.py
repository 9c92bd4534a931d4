"""The TCP line protocol, over real sockets, against one cluster."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdactors import Client, Cluster
from pdactors.actors.line_server import MAX_LINE_BYTES, DotStuffing

PROMPTS = ("what is the capital of France?", "the cat sat", "naïve café", "x")
ALWAYS = {"max_tokens": 1500, "ignore_eos": True}  # an answer that takes seconds


def chat(prompt: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}]


def unstuffed(lines: list[bytes]) -> str:
    return b"".join(line[1:] if line.startswith(b".") else line for line in lines).decode()


# ---- Plain --------


def test_a_plain_answer_is_the_text_that_json_mode_gives(cluster: Cluster, dial: Any) -> None:
    client = dial(cluster.tcp)
    for prompt in PROMPTS:
        expected = client.ask(messages=chat(prompt)).text
        client.send(prompt)
        lines = client.plain()
        assert unstuffed(lines) == (expected if not expected or expected.endswith("\n") else expected + "\n")


def test_a_generated_line_that_begins_with_a_dot_is_stuffed(cluster: Cluster, dial: Any) -> None:
    client = dial(cluster.tcp)
    stuffed = 0
    for number in range(200):
        prompt = f"prompt {number}"
        expected = client.ask(messages=chat(prompt)).text
        if not any(line.startswith(".") for line in expected.split("\n")):
            continue
        client.send(prompt)
        lines = client.plain()
        assert unstuffed(lines).rstrip("\n") == expected.rstrip("\n")
        stuffed += sum(line.startswith(b"..") for line in lines)
        break
    assert stuffed, "no prompt made the model begin a line with a dot"


def test_several_prompts_on_one_connection_are_answered_in_order(cluster: Cluster, dial: Any) -> None:
    client = dial(cluster.tcp)
    expected = []
    for prompt in PROMPTS:
        client.send(prompt)
        expected.append(client.plain())
    client.raw("".join(f"{prompt}\n" for prompt in PROMPTS).encode())
    assert [client.plain() for _ in PROMPTS] == expected


def test_end_of_input_finishes_the_plain_answers_and_closes(cluster: Cluster, dial: Any) -> None:
    client = dial(cluster.tcp)
    client.raw(b"the cat sat\nthe mat")  # the last line has no end
    client.end_input()
    client.plain()
    client.plain()
    assert client.rest() == b""


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"", b"error bad_request: prompt: is empty\n"),
        (b"   \t ", b"error bad_request: prompt: is empty\n"),
        (b"caf\xe9", b"error bad_request: prompt: not UTF-8 at byte 3\n"),
        (b"\xff\xfe\x00\x80", b"error bad_request: prompt: not UTF-8 at byte 0\n"),
    ],
)
def test_a_bad_plain_line_gets_an_error_and_the_connection_goes_on(
    cluster: Cluster, dial: Any, line: bytes, message: bytes
) -> None:
    client = dial(cluster.tcp)
    client.send(line)
    assert client.plain() == [message]
    client.send("the cat")
    assert not client.plain()[0].startswith(b"error")


def test_a_plain_prompt_that_is_too_long_is_an_error_line(cluster: Cluster, dial: Any) -> None:
    client = dial(cluster.tcp)
    client.send("~" * 5000)
    (line,) = client.plain()
    assert line.startswith(b"error prompt_too_long: ")
    assert b"model.max_model_len" in line


def test_carriage_returns_belong_to_the_line_end(cluster: Cluster, dial: Any) -> None:
    client = dial(cluster.tcp)
    client.send("the cat sat")
    expected = client.plain()
    client.raw(b"the cat sat\r\n")
    assert client.plain() == expected
    client.raw(b'{"prompt": "x", "max_tokens": 2}\r\n')
    assert client.answer().end["finish_reason"] == "length"


def test_a_line_may_come_in_pieces(cluster: Cluster, dial: Any) -> None:
    client = dial(cluster.tcp)
    for byte in b'{"prompt": "x", "max_tokens": 2}\n':
        client.raw(bytes([byte]))
    assert len(client.answer().tokens) == 2


def test_garbage_as_the_first_bytes_does_no_harm(cluster: Cluster, dial: Any) -> None:
    client = dial(cluster.tcp)
    client.raw(bytes(range(256)) * 4 + b"\n")
    client.end_input()
    assert b"error bad_request" in client.rest()


@given(st.text(alphabet=".\na", max_size=30), st.lists(st.integers(0, 30), max_size=8))
def test_dot_stuffing_is_undone_by_the_reader(text: str, cuts: list[int]) -> None:
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    dots = DotStuffing()
    wire = "".join(dots.push(text[a:b]) for a, b in pairwise(edges)).encode() + dots.end() + b".\n"
    lines = wire.splitlines(keepends=True)
    assert lines.index(b".\n") == len(lines) - 1  # the only end
    assert unstuffed(lines[:-1]) == text + ("\n" if text and not text.endswith("\n") else "")


# ---- JSON --------


def test_an_answer_is_tokens_and_a_done_with_usage_timing_and_path(cluster: Cluster, dial: Any) -> None:
    answer = dial(cluster.tcp).ask(id="a", prompt="the cat sat", max_tokens=5)
    assert [token["index"] for token in answer.tokens] == list(range(5))
    assert all(token.keys() == {"id", "event", "index", "token_id", "text"} for token in answer.tokens)
    end = answer.end
    assert {key: end[key] for key in ("id", "event", "finish_reason", "path")} == {
        "id": "a",
        "event": "done",
        "finish_reason": "length",
        "path": "lease",
    }
    assert end["usage"].keys() == {"prompt_tokens", "completion_tokens", "cached_tokens"}
    assert end["usage"]["completion_tokens"] == 5
    timing = end["timing"]
    assert timing.keys() == {"queue_ms", "prefill_ms", "migration_ms", "ttft_ms", "tpot_ms", "total_ms"}
    assert 0 < timing["ttft_ms"] <= timing["total_ms"]
    assert all(value >= 0 for value in timing.values())


def test_ids_are_strings_numbers_or_made_up(cluster: Cluster, dial: Any) -> None:
    client = dial(cluster.tcp)
    for id in ("a", "", "ü" * 128, 0, 2**53):
        assert client.ask(id=id, prompt="x", max_tokens=1).end["id"] == id
    made_up = [client.ask(prompt="x", max_tokens=1).end["id"] for _ in range(2)]
    assert len(set(made_up)) == 2


def test_several_requests_are_in_flight_on_one_connection(cluster: Cluster, dial: Any) -> None:
    client = dial(cluster.tcp)
    alone = {id: client.ask(id=id, prompt=f"prompt {id}", max_tokens=20).ids for id in range(12)}
    for id in range(12):
        client.send({"id": id, "prompt": f"prompt {id}", "max_tokens": 20})
    found: dict[int, list[int]] = {id: [] for id in range(12)}
    is_open = set(found)
    order = []
    while is_open:
        event = client.event()
        order.append(event["id"])
        if event["event"] == "token":
            found[event["id"]].append(event["token_id"])
        else:
            assert event["finish_reason"] == "length"
            is_open.discard(event["id"])
    assert found == alone
    assert order != sorted(order), "they were answered one after the other"


def test_one_id_cannot_be_in_flight_twice(cluster: Cluster, dial: Any) -> None:
    client = dial(cluster.tcp)
    client.send({"id": "a", "prompt": "x", "max_tokens": 50, "ignore_eos": True})
    client.send({"id": "a", "prompt": "y", "max_tokens": 1})
    events = [client.event()]
    while events[-1]["event"] != "done":
        events.append(client.event())
    (error,) = [event for event in events if event["event"] == "error"]
    assert (error["id"], error["code"]) == ("a", "bad_request")
    assert "in flight" in error["message"]
    assert events[-1]["usage"]["completion_tokens"] == 50
    assert client.ask(id="a", prompt="y", max_tokens=1).end["event"] == "done"  # it is free again


PROMPT = {"prompt": "x"}
BAD_LINES: list[tuple[str, bytes | dict[str, Any], str, str]] = [
    ("unknown field", PROMPT | {"max_token": 3}, "bad_request", "max_token"),
    ("string for a number", PROMPT | {"max_tokens": "3"}, "bad_request", "max_tokens"),
    ("fraction for a number", PROMPT | {"max_tokens": 1.5}, "bad_request", "max_tokens"),
    ("no tokens", PROMPT | {"max_tokens": 0}, "bad_request", "max_tokens: expected `int` >= 1"),
    ("too many tokens", PROMPT | {"max_tokens": 2**20 + 1}, "bad_request", "max_tokens: expected `int` <= 1048576"),
    ("negative minimum", PROMPT | {"min_tokens": -1}, "bad_request", "min_tokens: expected `int` >= 0"),
    ("minimum over maximum", PROMPT | {"min_tokens": 9, "max_tokens": 8}, "bad_request", "min_tokens: 9 is more"),
    ("cold", PROMPT | {"temperature": -0.1}, "bad_request", "temperature: expected `float` >= 0.0"),
    ("hot", PROMPT | {"temperature": 101}, "bad_request", "temperature: expected `float` <= 100.0"),
    ("not a number", b'{"prompt": "x", "temperature": NaN}', "bad_request", "malformed"),
    ("infinite", b'{"prompt": "x", "temperature": 1e999}', "bad_request", "temperature"),
    ("top_p zero", PROMPT | {"top_p": 0}, "bad_request", "top_p: expected `float` > 0.0"),
    ("top_p over one", PROMPT | {"top_p": 1.01}, "bad_request", "top_p: expected `float` <= 1.0"),
    ("top_k", PROMPT | {"top_k": -1}, "bad_request", "top_k: expected `int` >= 0"),
    ("seed", PROMPT | {"seed": -1}, "bad_request", "seed: expected `int` >= 0"),
    ("huge seed", PROMPT | {"seed": 2**70}, "bad_request", "seed"),
    ("logprobs", PROMPT | {"logprobs": 21}, "bad_request", "logprobs: expected `int` <= 20"),
    ("deadline", PROMPT | {"deadline_ms": 0}, "bad_request", "deadline_ms: expected `float` > 0.0"),
    ("priority", PROMPT | {"priority": "urgent"}, "bad_request", "priority"),
    ("empty stop", PROMPT | {"stop": [""]}, "bad_request", "stop[0]: expected `str` of length >= 1"),
    ("long stop", PROMPT | {"stop": "x" * 257}, "bad_request", "stop: expected `str` of length <= 256"),
    ("many stops", PROMPT | {"stop": ["x"] * 17}, "bad_request", "stop: expected `array` of length <= 16"),
    ("fraction as id", PROMPT | {"id": 1.5}, "bad_request", "id"),
    ("truth as id", PROMPT | {"id": True}, "bad_request", "id"),
    ("object as id", PROMPT | {"id": {}}, "bad_request", "id"),
    ("long id", PROMPT | {"id": "x" * 129}, "bad_request", "id: expected `str` of length <= 128"),
    ("negative id", PROMPT | {"id": -1}, "bad_request", "id: expected `int` >= 0"),
    ("huge id", PROMPT | {"id": 2**200}, "bad_request", "id"),
    ("empty object", {}, "bad_request", "exactly one of prompt, messages and prompt_token_ids"),
    ("two prompts", PROMPT | {"messages": chat("x")}, "bad_request", "got prompt, messages"),
    ("empty prompt", {"prompt": ""}, "bad_request", "prompt: is empty"),
    ("no ids", {"prompt_token_ids": []}, "bad_request", "prompt_token_ids: is empty"),
    ("negative token", {"prompt_token_ids": [-1]}, "bad_request", "prompt_token_ids[0]"),
    ("token as text", {"prompt_token_ids": ["1"]}, "bad_request", "prompt_token_ids[0]"),
    ("unknown token", {"prompt_token_ids": [5, 1000]}, "bad_request", "prompt_token_ids: token id 1000"),
    ("no messages", {"messages": []}, "bad_request", "messages must not be empty"),
    ("message as text", {"messages": ["x"]}, "bad_request", "messages[0]"),
    ("messages as text", {"messages": "x"}, "bad_request", "messages"),
    ("unknown role", {"messages": [{"role": "boss", "content": "x"}]}, "bad_request", "messages[0].role"),
    ("no role", {"messages": [{"content": "x"}]}, "bad_request", "messages[0].role"),
    ("no content", {"messages": [*chat("x"), {"role": "user"}]}, "bad_request", "messages[1].content"),
    ("list content", {"messages": [{"role": "user", "content": []}]}, "bad_request", "messages[0].content"),
    ("too long", {"prompt_token_ids": [5] * 2048}, "prompt_too_long", "model.max_model_len 2048"),
    ("much too long", {"prompt": "^~" * 20_000}, "prompt_too_long", "model.max_model_len 2048"),
    ("not closed", b'{"prompt": "x"', "bad_request", "malformed"),
    ("two objects", b'{"prompt": "x"} {}', "bad_request", "malformed"),
    ("not UTF-8", b'{"prompt": "\xff"}', "bad_request", "malformed"),
    ("half a character", b'{"prompt": "\\ud800"}', "bad_request", "malformed"),
    ("zero byte", b'{"prompt": "x\0"}', "bad_request", "malformed"),
    ("deep", b'{"prompt": ' + b"[" * 100_000, "bad_request", ""),
    ("deep message", b'{"messages": [' + b'{"a":' * 100_000, "bad_request", ""),
    ("cancel a list", b'{"cancel": []}', "bad_request", "cancel"),
    ("cancel and more", b'{"cancel": "a", "prompt": "x"}', "bad_request", "prompt"),
]


@pytest.mark.parametrize(
    ("line", "code", "part"), [case[1:] for case in BAD_LINES], ids=[case[0] for case in BAD_LINES]
)
def test_a_bad_line_gets_its_error_and_the_connection_goes_on(
    cluster: Cluster, dial: Any, line: bytes | dict[str, Any], code: str, part: str
) -> None:
    client = dial(cluster.tcp)
    client.send(line)
    error = client.event()
    assert (error["event"], error["code"]) == ("error", code)
    assert part in error["message"]
    assert "\n" not in error["message"]
    if isinstance(line, dict) and isinstance(line.get("id"), str):
        assert error["id"] == line["id"]
    assert client.ask(prompt="x", max_tokens=1).end["event"] == "done"


def test_a_line_of_exactly_the_limit_is_read(cluster: Cluster, dial: Any) -> None:
    client = dial(cluster.tcp)
    line = json.dumps({"prompt": "x", "max_tokens": 1}).encode()
    client.send(line + b" " * (MAX_LINE_BYTES - len(line)))
    assert client.answer().end["event"] == "done"


@pytest.mark.parametrize("size", [MAX_LINE_BYTES + 1, 20 * MAX_LINE_BYTES])
def test_an_oversized_line_gets_an_error_and_is_closed(cluster: Cluster, dial: Any, size: int) -> None:
    client = dial(cluster.tcp)
    client.raw(b'{"prompt": "' + b"x" * size)
    client.raw(b'"}\n')
    client.end_input()
    (line,) = client.rest().splitlines()
    error = json.loads(line)
    assert (error["id"], error["code"]) == (None, "bad_request")
    assert str(MAX_LINE_BYTES) in error["message"]


def test_an_oversized_line_without_an_end_is_answered_too(cluster: Cluster, dial: Any) -> None:
    client = dial(cluster.tcp)
    client.raw(b"x" * (MAX_LINE_BYTES * 3))  # and goes on being silent
    assert client.event()["code"] == "bad_request"
    assert client.rest() == b""


# ---- Endings --------


def test_cancel_ends_a_request_and_the_connection_goes_on(cluster: Cluster, dial: Any) -> None:
    client = dial(cluster.tcp)
    client.send({"id": "a", "prompt": "^", **ALWAYS})
    client.event()
    client.send({"cancel": "a"})
    answer = client.answer()
    assert answer.end["finish_reason"] == "cancelled"
    assert answer.end["usage"]["completion_tokens"] == len(answer.tokens) + 1 < ALWAYS["max_tokens"]
    assert client.ask(prompt="x", max_tokens=1).end["finish_reason"] == "length"


def test_cancelling_what_is_not_in_flight_is_ignored(cluster: Cluster, dial: Any) -> None:
    client = dial(cluster.tcp)
    client.send({"cancel": "nobody"})
    client.ask(id="a", prompt="x", max_tokens=1)
    client.send({"cancel": "a"})
    client.send({"cancel": 7})
    assert client.ask(id="b", prompt="x", max_tokens=1).end["id"] == "b"


def test_a_request_cannot_be_cancelled_from_another_connection(cluster: Cluster, dial: Any) -> None:
    one, other = dial(cluster.tcp), dial(cluster.tcp)
    one.send({"id": "a", "prompt": "^", "max_tokens": 100})
    other.send({"cancel": "a"})
    assert other.ask(prompt="x", max_tokens=1).end["event"] == "done"
    assert one.answer().end["finish_reason"] == "length"


def test_end_of_input_cancels_json_requests_and_closes(cluster: Cluster, dial: Any) -> None:
    client = dial(cluster.tcp)
    client.send({"id": "a", "prompt": "^", **ALWAYS})
    client.send({"id": "b", "prompt": "^", **ALWAYS})
    client.event()
    client.end_input()
    events = [json.loads(line) for line in client.rest().splitlines()]
    ends = {event["id"]: event["finish_reason"] for event in events if event["event"] == "done"}
    assert ends == {"a": "cancelled", "b": "cancelled"}


def test_a_disconnect_frees_everything_within_a_second(
    cluster: Cluster, dial: Any, busy: Callable[[], int], wait: Callable[..., None]
) -> None:
    client = dial(cluster.tcp)
    for id in range(3):
        client.send({"id": id, "prompt": "^", **ALWAYS})
    wait(lambda: busy() == 3, 5.0, "the requests do not run")
    client.close()
    wait(lambda: busy() == 0, 1.0, "requests of clients that left still run")


def test_a_reset_connection_frees_everything(
    cluster: Cluster, dial: Any, busy: Callable[[], int], wait: Callable[..., None]
) -> None:
    client = dial(cluster.tcp)
    client.send({"id": "a", "prompt": "^", **ALWAYS})
    client.event()
    client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    client.close()
    wait(lambda: busy() == 0, 1.0, "the request still runs")


def test_a_reader_that_is_too_slow_is_cut_off_and_others_are_not_slowed(
    cluster: Cluster, dial: Any, busy: Callable[[], int], wait: Callable[..., None]
) -> None:
    slow = dial(cluster.tcp, receive_buffer=4096)
    for id in range(24):
        slow.send({"id": id, "prompt": f"prompt {id}", "logprobs": 20, **ALWAYS})
    other = dial(cluster.tcp)
    expected = other.ask(prompt="the cat sat", max_tokens=200, ignore_eos=True)
    wait(lambda: busy() == 0, 30.0, "a client that reads nothing keeps its requests")
    assert len(expected.tokens) == 200
    assert other.ask(prompt="the cat sat", max_tokens=200, ignore_eos=True).ids == expected.ids
    assert b'"event":"done"' not in slow.rest()


def test_a_queued_request_ends_with_timeout_at_its_deadline(cluster: Cluster, dial: Any) -> None:
    client = dial(cluster.tcp)
    began = time.monotonic()
    answer = client.ask(prompt="^", deadline_ms=300, **ALWAYS)
    assert answer.end["code"] == "timeout"
    assert time.monotonic() - began < 3.0


# ---- Sampling and stopping --------


def test_the_end_token_as_the_first_one_ends_the_answer_without_text(cluster: Cluster, dial: Any) -> None:
    answer = dial(cluster.tcp).ask(prompt="the end~")
    assert answer.text == ""
    assert len(answer.tokens) == 1
    assert (answer.end["finish_reason"], answer.end["path"]) == ("stop", "none")
    assert answer.end["usage"]["completion_tokens"] == 1


def test_ignore_eos_and_min_tokens_go_past_the_end_token(cluster: Cluster, dial: Any) -> None:
    client = dial(cluster.tcp)
    eos = client.ask(prompt="the end~").ids[0]
    ignored = client.ask(prompt="the end~", ignore_eos=True, max_tokens=5)
    assert ignored.ids[0] == eos
    assert ignored.end["finish_reason"] == "length"
    later = client.ask(prompt="the end~", min_tokens=3, max_tokens=5)
    assert len(later.tokens) >= 3
    assert eos not in later.ids[:3]


def test_one_token_is_all_that_max_tokens_1_gives(cluster: Cluster, dial: Any) -> None:
    answer = dial(cluster.tcp).ask(prompt="the cat", max_tokens=1)
    assert len(answer.tokens) == 1
    assert (answer.end["finish_reason"], answer.end["path"]) == ("length", "none")
    assert answer.end["timing"]["tpot_ms"] == 0


def test_max_tokens_gives_way_to_the_models_length(cluster: Cluster, dial: Any) -> None:
    answer = dial(cluster.tcp).ask(prompt_token_ids=[5] * 2045, max_tokens=100, ignore_eos=True)
    assert len(answer.tokens) == 3
    assert answer.end["finish_reason"] == "length"
    assert answer.end["usage"]["prompt_tokens"] == 2045


@pytest.mark.parametrize("stop", ["\n.\n", ".\n.", "\n", ["never", "\n.\n.\n."]])
def test_a_stop_string_ends_the_text_before_it(cluster: Cluster, dial: Any, stop: Any) -> None:
    client = dial(cluster.tcp)
    full = client.ask(prompt="go^", max_tokens=20).text
    assert full.startswith("\n.\n.\n.")
    answer = client.ask(prompt="go^", max_tokens=20, stop=stop)
    cut = min(full.find(s) for s in ([stop] if isinstance(stop, str) else stop) if s in full)
    assert answer.text == full[:cut]
    assert answer.end["finish_reason"] == "stop"


def test_a_stop_string_inside_one_token_and_across_two_is_found(cluster: Cluster, dial: Any) -> None:
    client = dial(cluster.tcp)
    prompt, answer, piece = next(
        (prompt, answer, token["text"])
        for prompt in map("text {}".format, range(30))
        for answer in [client.ask(prompt=prompt, max_tokens=30)]
        for token in answer.tokens
        if len(token["text"]) > 1 and token["text"].isascii()
    )
    inside = piece[1:]
    across = answer.text[2:6]
    for stop in (inside, across):
        stopped = client.ask(prompt=prompt, max_tokens=30, stop=stop)
        assert stopped.text == answer.text[: answer.text.find(stop)]
        assert stopped.end["finish_reason"] == "stop"


def test_text_pieces_are_the_answer_and_half_characters_are_held_back(cluster: Cluster, dial: Any) -> None:
    client = dial(cluster.tcp)
    prompt = client.ask(prompt="x", max_tokens=1).end["usage"]["prompt_tokens"]
    assert prompt == 1
    answers = [client.ask(prompt=f"text {number}", max_tokens=40) for number in range(10)]
    assert any(token["text"] == "" for answer in answers for token in answer.tokens[:-1])


def test_logprobs_name_the_chosen_token_and_the_best_alternatives(cluster: Cluster, dial: Any) -> None:
    client = dial(cluster.tcp)
    answer = client.ask(prompt="the cat", max_tokens=4, logprobs=3)
    for token in answer.tokens:
        top = token["logprobs"]["top"]
        assert [entry["logprob"] for entry in top] == sorted((e["logprob"] for e in top), reverse=True)
        assert len(top) == 3
        assert top[0]["token_id"] == token["token_id"]  # greedy
        assert token["logprobs"]["logprob"] == pytest.approx(top[0]["logprob"])
        assert token["logprobs"]["logprob"] <= 0
    assert answer.ids == client.ask(prompt="the cat", max_tokens=4).ids


def test_a_seed_gives_the_same_answer_whatever_runs_beside_it(cluster: Cluster, dial: Any) -> None:
    client = dial(cluster.tcp)
    hot = {"prompt": "the cat", "max_tokens": 20, "temperature": 1.5, "ignore_eos": True}
    first = client.ask(**hot, seed=5).ids
    other = dial(cluster.tcp)
    for id in range(6):
        other.send({"id": id, **hot, "seed": id})
    assert client.ask(**hot, seed=5).ids == first
    assert client.ask(**hot, seed=6).ids != first
    greedy = client.ask(prompt="the cat", max_tokens=20, ignore_eos=True).ids
    assert greedy != first
    assert client.ask(**{**hot, "top_k": 1}, seed=5).ids == greedy
    assert client.ask(**{**hot, "top_p": 1e-6}, seed=5).ids == greedy


def test_hundreds_of_requests_on_many_connections_all_end(cluster: Cluster, dial: Any) -> None:
    ends: list[str] = []

    def talk(number: int) -> None:
        client = dial(cluster.tcp)
        for turn in range(10):
            client.send({"id": turn, "prompt": f"talk {number} {turn}", "max_tokens": 1 + (number * turn) % 12})
            if turn % 3 == 2:
                client.send({"cancel": turn})
        mine: list[str] = []
        while len(mine) < 10:
            event = client.event()
            if event["event"] != "token":
                mine.append(event["finish_reason"])
        ends.extend(mine)

    threads = [threading.Thread(target=talk, args=(number,)) for number in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(ends) == 200


@pytest.fixture
def busy(cluster: Cluster) -> Any:
    """Return how many requests the cluster has."""
    with Client(cluster.zmq) as client:
        yield lambda: client.status()["requests"]

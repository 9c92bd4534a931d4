"""A cluster that asks its clients for a token, and whose KV memory is smaller than the model's longest sequence."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from pdactors import BadRequest, Client, Cluster, PromptTooLong, Unauthorized

TOKEN = "open-sesame"


@pytest.fixture(scope="module")
def guarded(start: Any) -> Iterator[Cluster]:
    keys = {"security.token": TOKEN, "kv.memory": "1MiB", "model.max_model_len": 4096}
    with start(**keys) as cluster:
        yield cluster


@pytest.fixture
def client(guarded: Cluster) -> Iterator[Client]:
    with Client(guarded.zmq, token=TOKEN) as client:
        yield client


def test_the_right_token_lets_in(guarded: Cluster, dial: Any) -> None:
    line = dial(guarded.tcp)
    line.send({"token": TOKEN})
    assert line.ask(prompt="x", max_tokens=1).end["event"] == "done"
    line.send("the cat")
    assert line.plain()


@pytest.mark.parametrize(
    "first",
    [
        b'{"token": "wrong"}',
        b'{"token": ""}',
        b'{"token": "open-sesame "}',
        b'{"token": 7}',
        b'{"token": "open-sesame", "prompt": "x"}',
        b'{"prompt": "x"}',
        b'{"cancel": "a"}',
        b'{"token": ' + b"[" * 50_000,
        b'{"a": ' + b"[" * 50_000,
        b"the cat sat",
        b"",
        b"\xff\xff",
        b'{"token": "\xff"}',
    ],
)
def test_any_other_first_line_is_an_error_and_the_end(guarded: Cluster, dial: Any, first: bytes) -> None:
    line = dial(guarded.tcp)
    line.send(first)
    line.send({"token": TOKEN})  # too late
    line.send({"prompt": "x", "max_tokens": 1})
    line.end_input()
    (answer,) = line.rest().splitlines()
    error = json.loads(answer)
    assert (error["event"], error["code"]) == ("error", "unauthorized")
    assert TOKEN not in error["message"]


@pytest.mark.parametrize("token", ["", "wrong", "öffne dich"])
def test_the_client_library_raises_unauthorized(guarded: Cluster, token: str) -> None:
    with pytest.raises(Unauthorized, match="token"):
        Client(guarded.zmq, token=token)


def test_the_token_is_in_no_command_line_and_no_status(guarded: Cluster, client: Client) -> None:
    import psutil

    pids = [actor.pid for actor in guarded.ready.actors]
    assert not any(TOKEN in " ".join(psutil.Process(pid).cmdline()) for pid in pids)
    assert TOKEN not in json.dumps(client.status()) + json.dumps(client.leaks())


def test_a_prompt_that_the_memory_never_holds_is_too_long(client: Client) -> None:
    with pytest.raises(PromptTooLong, match=r"kv\.memory holds \d+"):
        client.generate(prompt_token_ids=[5] * 3000, max_tokens=1)


def test_an_answer_that_the_memory_never_holds_is_refused(client: Client) -> None:
    with pytest.raises(BadRequest, match=r"max_tokens: .*kv\.memory holds \d+"):
        client.generate("x", max_tokens=4000)


def test_as_much_as_the_memory_holds_is_served(client: Client, wait: Any) -> None:
    with pytest.raises(PromptTooLong) as caught:
        client.generate(prompt_token_ids=[5] * 3000, max_tokens=1)
    limit = int(caught.value.message.partition("kv.memory holds ")[2].split()[0])
    prompt = [5] * (limit - 1)  # the last token's KV is never needed
    assert len(client.generate(prompt_token_ids=prompt, max_tokens=2, ignore_eos=True).token_ids) == 2
    with pytest.raises(BadRequest, match="max_tokens"):
        client.generate(prompt_token_ids=prompt, max_tokens=3)
    with pytest.raises(PromptTooLong):
        client.generate(prompt_token_ids=[5] * limit, max_tokens=1)


def test_more_than_the_memory_holds_at_once_is_served_one_after_the_other(client: Client) -> None:
    import threading

    lengths = []

    def ask(number: int) -> None:
        answer = client.generate(prompt_token_ids=[5 + number] * 600, max_tokens=100, ignore_eos=True)
        lengths.append(len(answer.token_ids))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert lengths == [100] * 12


def test_nothing_is_left(guarded: Cluster, client: Client, wait: Any) -> None:
    wait(lambda: not any(client.leaks().values()), 2.0, "something is held for nobody")
    assert client.status()["requests"] == 0


def test_a_browser_gets_pages_without_data_and_the_data_for_the_token(guarded: Cluster, client: Client) -> None:
    answer = client.generate("the cat", max_tokens=2)
    for path in ("/", "/trace/x", f"/trace/{answer.request}", f"/trace/{answer.request}.json%0A"):
        page = httpx2.get(f"http://{guarded.http}{path}", timeout=10.0)
        assert page.status_code == 200
        assert answer.request not in page.text
    for path in ("/status", f"/timeline/{answer.request}", f"/timeline/{answer.request}?form=chrome", "/timeline/%0A"):
        assert httpx2.get(f"http://{guarded.http}{path}", timeout=10.0).status_code == 401
        known = httpx2.get(f"http://{guarded.http}{path}", headers={"authorization": f"Bearer {TOKEN}"}, timeout=10.0)
        assert known.status_code == 200

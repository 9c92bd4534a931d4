"""Timelines of real requests: their parts are what the client measured, whatever became of them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from click.testing import CliRunner, Result
from netns import missing, namespaces
from test_migration import cluster_file
from test_nodes import JOIN_TOKEN, QUICK, TOKEN, Machines, Settings

from pdactors import AsyncClient, BadRequest, Client, Cluster, PDError
from pdactors.cli.main import main

MakeIds = Callable[[object, int], list[int]]
Timeline = dict[str, Any]
TRIES = 10  # a busy machine keeps the client waiting now and then
CLOSE_MS, CLOSE = 5.0, 0.02


class Measured:
    """A request over TCP, as its client sees it."""

    def __init__(self, address: str, token: str = "", **fields: object) -> None:
        host, _, port = address.rpartition(":")
        with (
            socket.create_connection((host, int(port)), timeout=60.0) as connection,
            connection.makefile("rb") as lines,
        ):
            if token:
                connection.sendall(json.dumps({"token": token}).encode() + b"\n")
            began_s, first_s = time.monotonic(), None
            connection.sendall(json.dumps(fields).encode() + b"\n")
            for line in lines:
                event = json.loads(line)
                if event["event"] != "token":
                    break
                first_s = first_s or time.monotonic()
            self.total_ms = 1000 * (time.monotonic() - began_s)
            self.ttft_ms = 1000 * ((first_s or time.monotonic()) - began_s)
            self.done = event


def total(parts: list[dict[str, Any]]) -> float:
    return float(sum(part["ms"] for part in parts))


def hold(timeline: Timeline) -> None:
    """Hold that the parts add up to the whole."""
    first, rest = total(timeline["first"]), total(timeline["rest"])
    assert first == pytest.approx(timeline["total_ms"] if timeline["ttft_ms"] is None else timeline["ttft_ms"], abs=0.1)
    assert first + rest == pytest.approx(timeline["total_ms"], abs=0.1)


def is_close(measured: Measured, timeline: Timeline) -> bool:
    pairs = (measured.ttft_ms, timeline["ttft_ms"]), (measured.total_ms, timeline["total_ms"])
    for client_ms, told_ms in pairs:
        assert told_ms <= client_ms + 0.1  # all of it lies within what the client saw
    return all(client_ms - told_ms <= max(CLOSE_MS, CLOSE * client_ms) for client_ms, told_ms in pairs)


def lanes(timeline: Timeline) -> dict[str, dict[str, Any]]:
    return {lane["actor"]: lane for lane in timeline["lanes"]}


def spans(timeline: Timeline, actor: str, what: str) -> list[dict[str, Any]]:
    return [span for span in lanes(timeline)[actor]["spans"] if span["what"] == what]


@pytest.fixture
def client(cluster: Cluster) -> Iterator[Client]:
    with Client(cluster.zmq) as client:
        yield client


def test_the_parts_add_up_to_what_the_client_measured(cluster: Cluster, client: Client, make_ids: MakeIds) -> None:
    for i in range(TRIES):
        prompt = make_ids(("trace", i), 900)
        measured = Measured(cluster.tcp, prompt_token_ids=prompt, max_tokens=30, ignore_eos=True)
        timeline = client.trace(measured.done["request"])
        hold(timeline)
        if is_close(measured, timeline):
            break
    else:
        pytest.fail(f"the client measured {measured.ttft_ms} and {measured.total_ms}: {timeline}")
    assert (timeline["end"], timeline["num_tokens"]) == ("length", 30)
    chunks = spans(timeline, "n0/prefill-0", "chunk")
    assert [chunk["detail"]["tokens"] for chunk in chunks] == [512, 388]
    stages = [span["what"] for span in lanes(timeline)["router"]["spans"]]
    assert stages == ["queued", "prefilling", "waiting", "adopting", "decoding", "gone"]
    decode = lanes(timeline)["n0/decode-0"]
    assert len(decode["step_at_ms"]) == len(decode["step_batch"]) == 29
    assert set(decode["step_batch"]) == {1}
    assert decode["step_at_ms"] == sorted(decode["step_at_ms"])
    assert all(lane["clock"]["is_shared"] for lane in timeline["lanes"])
    written = lanes(timeline)["gateway"]["written_ms"]
    assert len(written) == 30
    assert written[0] == timeline["ttft_ms"]


def test_steps_tell_how_many_sequences_shared_them(cluster: Cluster, client: Client) -> None:
    async def both() -> list[Any]:
        async with AsyncClient(cluster.zmq) as other:
            ask = {"max_tokens": 60, "ignore_eos": True}
            return await asyncio.gather(*(other.generate(prompt, **ask) for prompt in ("the cat", "the mat")))

    answers = asyncio.run(both())
    batches = [lanes(client.trace(answer.request))["n0/decode-0"]["step_batch"] for answer in answers]
    assert all(2 in batch for batch in batches)


def test_failed_and_cancelled_requests_have_one_too(cluster: Cluster, client: Client) -> None:
    events = client.events("^", max_tokens=2000, ignore_eos=True)
    for _ in range(3):
        next(events)
    events.close()
    with pytest.raises(PDError):
        client.generate("^", max_tokens=2000, ignore_eos=True, deadline_ms=300)
    with pytest.raises(PDError):
        client.generate(prompt_token_ids=[5] * 5000)
    found = client.requests()[:3]
    assert [request["end"] for request in found] == ["prompt_too_long", "timeout", "cancelled"]
    for request in found:
        timeline = client.trace(request["request"])
        hold(timeline)
        assert timeline["end"] == request["end"]
        assert timeline["total_ms"] == pytest.approx(request["total_ms"], abs=0.1)
    refused, late, cancelled = (client.trace(request["request"]) for request in found)
    assert [*lanes(refused)] == ["gateway"]
    assert "5000 tokens" in refused["message"]
    assert late["total_ms"] >= 300
    assert spans(late, "router", "gone")[0]["detail"]["why"] == "timeout"
    assert cancelled["num_tokens"] >= 3


def test_requests_are_found_by_their_clients_id_and_the_last_one_without(cluster: Cluster, client: Client) -> None:
    done = Measured(cluster.tcp, id="mine-4711", prompt="the cat", max_tokens=2).done
    assert client.trace("mine-4711")["request"] == client.trace()["request"] == done["request"]
    with pytest.raises(BadRequest, match="not among the last"):
        client.trace("nobody's")


@pytest.mark.slow
def test_an_actor_forgets_and_says_so(start: Any) -> None:
    with start(**{"trace.requests": 2, "trace.steps": 8, "listen.http": ""}) as cluster, Client(cluster.zmq) as client:
        answers = [client.generate("^", max_tokens=20, ignore_eos=True) for _ in range(3)]
        with pytest.raises(BadRequest, match="not among the last 2"):
            client.trace(answers[0].request)
        lane = lanes(client.trace(answers[2].request))["n0/decode-0"]
        assert (len(lane["step_at_ms"]), lane["num_lost"]) == (8, 11)


# ---- The command --------


def trace(cluster: Cluster, *arguments: str) -> Result:
    return CliRunner().invoke(main, ["trace", *arguments, "--zmq", cluster.zmq])


def test_the_command_writes_a_page_and_a_chrome_trace_and_tells_the_parts(cluster: Cluster, tmp_path: Path) -> None:
    done = Measured(cluster.tcp, prompt="the cat", max_tokens=4, ignore_eos=True).done
    page, chrome = tmp_path / "t.html", tmp_path / "t.json"
    shown = trace(cluster, done["request"], "-o", str(page))
    assert shown.exit_code == 0, shown.output
    assert "decode steps" in shown.output
    assert max(map(len, shown.output.splitlines())) <= 80
    text = page.read_text()
    assert json.loads(text.split('id="data">')[1].split("</script>")[0])["request"] == done["request"]
    assert trace(cluster, done["request"], "-o", str(chrome)).exit_code == 0
    assert {event["name"] for event in json.loads(chrome.read_text())["traceEvents"]} >= {"decode step", "chunk"}
    assert json.loads(trace(cluster, "--json").output)["request"] == done["request"]
    assert done["request"] in trace(cluster, "--list").output
    assert json.loads(trace(cluster, "--list", "--json").output)["requests"][0]["num_tokens"] == 4
    assert trace(cluster, "nobody's").exit_code == 1
    assert trace(cluster, "-o", "t.txt").exit_code == 2


# ---- Over HTTP --------


def test_pages_and_what_they_ask_for_are_served(cluster: Cluster) -> None:
    asked = httpx2.post(
        f"http://{cluster.http}/v1/completions",
        json={"prompt": "the cat", "max_tokens": 3},
        headers={"x-request-id": "a/b"},
    )
    assert asked.headers["x-request-id"] == "a/b"

    def get(path: str) -> httpx2.Response:
        return httpx2.get(f"http://{cluster.http}{path}", timeout=10.0)

    for path in ("/", "/trace/a%2Fb"):
        page = get(path)
        assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
        assert "default-src 'none'" in page.headers["content-security-policy"]
    status = get("/status").json()
    assert {actor["name"] for actor in status["actors"]} >= {"router", "n0/decode-0"}
    assert (status["obstacle"], status["recent"][0]["id"]) == ("", "a/b")
    timeline = get("/timeline/a%2Fb").json()
    hold(timeline)
    assert timeline["request"] == status["recent"][0]["request"]
    assert get("/timeline/a%2Fb?form=chrome").json()["otherData"]["request"] == timeline["request"]
    assert get("/timeline/nobody").status_code == 404


# ---- Two machines, whose clocks differ --------


@pytest.mark.slow
def test_a_timeline_over_two_machines_knows_their_clocks_and_adds_up(
    tmp_path: Path, home: Path, tiny_settings: Settings, make_ids: MakeIds, wait: Any
) -> None:
    pytest.importorskip("ucxx")
    if why := missing():
        pytest.skip(why)
    ahead_s = 5000
    with namespaces(2, rate="100mbit") as hosts:
        file = cluster_file(tmp_path, [host.address for host in hosts])
        keys = {
            "router.control": f"tcp://{hosts[0].address}:7300",
            "listen.tcp": f"{hosts[0].address}:7302",
            "listen.zmq": f"tcp://{hosts[0].address}:7301",
            "security.token": TOKEN,
            "security.join_token": JOIN_TOKEN,
            "kv.compression": "int8",
            "engine.chunk_tokens": 128,
            **QUICK,
        }
        with Machines(hosts, [str(file), *tiny_settings(**keys)], tmp_path) as both:
            both.launch(0)
            try:
                both.launch(1, clock_ahead_s=ahead_s)
            except ChildProcessError as error:
                pytest.skip(f"no clock of its own can be had: {error}")
            _trace_a_move(both, make_ids, wait, ahead_s)


def _trace_a_move(both: Machines, make_ids: MakeIds, wait: Any, ahead_s: float) -> None:
    with both.client() as client, contextlib.ExitStack() as entered:
        entered.enter_context(both.hosts[0].entered())

        def ask(i: int) -> tuple[Measured, Timeline]:
            fields = {"prompt_token_ids": make_ids(("far", i), 1500), "max_tokens": 20, "ignore_eos": True}
            measured = Measured(both.launched[0].ready.tcp, TOKEN, **fields)
            timeline = client.trace(measured.done["request"])
            hold(timeline)
            return measured, timeline

        wait(lambda: not ask(-1)[1].get("silent"), 30.0, "the clock of n1 is not known")
        for i in range(TRIES):
            measured, timeline = ask(i)
            if is_close(measured, timeline):
                break
        else:
            pytest.fail(f"the client measured {measured.ttft_ms} and {measured.total_ms}: {timeline}")
    assert measured.done["path"] == "ucx"
    for name in ("n1/migrator", "n1/decode-0"):
        clock = lanes(timeline)[name]["clock"]
        assert not clock["is_shared"]
        assert abs(clock["offset_s"] - ahead_s) <= clock["error_s"] < 0.05
    sent, received = spans(timeline, "n0/migrator", "send"), spans(timeline, "n1/migrator", "receive")
    assert len(sent) == len(received) >= 3
    assert all(span["detail"]["path"] == "ucx" and span["detail"]["codec"] == "int8" for span in (*sent, *received))
    assert sum(span["detail"]["blocks"] for span in sent) == -(-1500 // 32)
    error_ms = 1000 * lanes(timeline)["n1/migrator"]["clock"]["error_s"] + 1
    assert min(s["at_ms"] for s in received) <= min(s["at_ms"] for s in sent) + error_ms  # room came first
    parts = {part["what"]: part["ms"] for part in timeline["rest"]}
    assert parts["KV moves"] > 0
    assert parts["decode steps"] > 0
    assert timeline["end"] == "length"

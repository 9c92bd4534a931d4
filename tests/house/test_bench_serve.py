"""`bench serve` on real clusters of the tiny model, and on a server that it is pointed at."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from aiohttp import web
from click.testing import CliRunner, Result

from pdactors import Cluster
from pdactors.bench.line_target import LineTarget
from pdactors.bench.load import Record, open_loop
from pdactors.bench.results import ServeBench
from pdactors.bench.workload import Request
from pdactors.cli.main import main

Bench = Callable[..., Result]


@pytest.fixture
def bench(home: Path, tiny_settings: Callable[..., list[str]]) -> Bench:
    """Call `pdactors bench serve` on the tiny model."""

    def call(*arguments: str) -> Result:
        return CliRunner().invoke(main, ["bench", "serve", *tiny_settings(), *arguments])

    return call


def test_two_modes_are_measured_with_the_same_requests(bench: Bench, tmp_path: Path) -> None:
    report = tmp_path / "report.html"
    result = bench("--modes", "chunked,disaggregated", "--rate", "20", "--requests", "10", "--json", "-o", str(report))
    assert (result.exit_code, result.stderr) == (0, "")
    found = msgspec.json.decode(result.stdout, type=ServeBench)
    assert list(found.servers) == ["chunked", "disaggregated"]
    for mode, server in found.servers.items():
        assert server.overall is not None
        assert (server.overall.requests, server.overall.done, server.overall.errors) == (10, 10, {})
        assert {kind: figures.done for kind, figures in server.kinds.items()} == {"chat": 8, "long": 2}
        assert server.overall.tokens == 8 * 64 + 2 * 16
        assert server.overall.cached_tokens == 0
        (run,) = server.rounds
        assert run.rate == 20.0
        roles = {actor.role for actor in run.actors.values()}
        assert roles == {"router", "gateway", "migrator"} | ({"worker"} if mode == "chunked" else {"prefill", "decode"})
        assert all(actor.busy_share is not None and actor.busy_share >= 0 for actor in run.actors.values())
    prompts = {server.overall.prompt_tokens for server in found.servers.values() if server.overall}
    assert len(prompts) == 1
    paths = found.servers["disaggregated"].overall
    assert paths is not None
    assert paths.paths == {"lease": 10}
    assert found.verdict
    assert report.read_text("utf-8").count("<svg") >= 4


def test_a_trace_is_replayed_and_its_common_prefix_is_found_in_the_cache(bench: Bench, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    line = {"input_length": 2048, "output_length": 16}
    lines = [{**line, "timestamp": 300 * i, "hash_ids": [1, 2, 3, 10 + i]} for i in range(4)]
    trace.write_text("\n".join(map(json.dumps, lines)) + "\n")
    result = bench("--modes", "disaggregated", "--trace", str(trace), "--scale", "4", "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    found = msgspec.json.decode(result.stdout, type=ServeBench).servers["disaggregated"].overall
    assert found is not None
    assert (found.done, found.prompt_tokens, found.tokens) == (4, 4 * 512, 4 * 4)
    assert found.cached_tokens > 0


def test_a_cluster_that_refuses_is_counted_by_code(start: Callable[..., object]) -> None:
    """What a full queue refuses is counted; what was accepted is answered whole."""
    requests = [Request("chat", tuple(range(20 + i, 60 + i)), 64) for i in range(40)]

    async def ask(address: str) -> list[Record]:
        async with LineTarget.connect(address) as target:
            return await open_loop(target, requests, patience_s=60)

    with start(**{"router.max_queue": 4, "engine.max_batch": 2}) as cluster:  # type: ignore[attr-defined]
        assert isinstance(cluster, Cluster)
        records = asyncio.run(ask(cluster.tcp))
    assert {record.error for record in records} == {None, "overloaded"}
    assert {(record.num_tokens, len(record.stamps)) for record in records if record.error is None} == {(64, 64)}


# ---- Another server --------


@contextmanager
def peer() -> Iterator[str]:
    """An OpenAI-compatible server in a thread, which refuses every third request."""
    count = 0

    async def completions(request: web.Request) -> web.StreamResponse:
        nonlocal count
        count += 1
        body = await request.json()
        if count % 3 == 0:
            return web.json_response({"error": {"message": "busy"}}, status=503)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for i in range(body["max_tokens"]):
            is_last = i + 1 == body["max_tokens"]
            choice = {"index": 0, "text": "x", "finish_reason": "length" if is_last else None}
            await response.write(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    async def models(_request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "peer"}]})

    async def serve(started: Callable[[str, Callable[[], None]], None]) -> None:
        app = web.Application(client_max_size=1 << 24)
        app.add_routes([web.post("/v1/completions", completions), web.get("/v1/models", models)])
        runner = web.AppRunner(app, shutdown_timeout=1.0)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        ended = asyncio.Event()
        loop = asyncio.get_running_loop()
        started(f"http://127.0.0.1:{runner.addresses[0][1]}", lambda: loop.call_soon_threadsafe(ended.set))
        await ended.wait()
        await runner.cleanup()

    ready = threading.Event()
    told: list[tuple[str, Callable[[], None]]] = []

    def note(url: str, stop: Callable[[], None]) -> None:
        told.append((url, stop))
        ready.set()

    thread = threading.Thread(target=lambda: asyncio.run(serve(note)))
    thread.start()
    assert ready.wait(10)
    url, stop = told[0]
    try:
        yield url
    finally:
        stop()
        thread.join(10)


def test_a_peer_is_asked_the_same_and_no_cluster_is_started(bench: Bench) -> None:
    with peer() as url:
        result = bench("--url", url, "--workload", "chat", "--concurrency", "2", "--requests", "12", "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    found = msgspec.json.decode(result.stdout, type=ServeBench)
    server = found.servers[url]
    assert server.overall is not None
    assert (server.overall.done, server.overall.errors) == (8, {"overloaded": 4})
    assert server.overall.tokens == 8 * 64
    assert server.rounds[0].actors == {}
    assert found.verdict.startswith(f"Only {url} was measured")


def test_a_peer_that_is_not_there_is_said_and_the_status_is_1(bench: Bench) -> None:
    with peer() as url:
        pass
    result = bench("--url", url, "--requests", "2", "--rate", "10")
    assert result.exit_code == 1
    assert f"nobody answers at {url}" in " ".join(result.stdout.split())

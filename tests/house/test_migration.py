"""KV that moves between nodes over UCX: the same tokens as on one node, whatever happens on the way."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
from netns import Host, missing, namespaces
from scrape import Scrape
from test_nodes import JOIN_TOKEN, LOST_S, QUICK, TOKEN, Machines, Settings

from pdactors import AsyncClient, Client, Cluster, PDError, launch
from pdactors.engine.batch import Span, StepBatch
from pdactors.engine.load import load_model
from pdactors.engine.model import PagedModel
from pdactors.engine.pruner import num_scratch, prune
from pdactors.kernels.pack import zeros

pytest.importorskip("ucxx", reason="transfers between nodes need ucxx: pip install 'pdactors[ucx]'")

MakeIds = Callable[[object, int], list[int]]
Wait = Callable[..., None]
Asked = list[dict[str, Any]]
BLOCK_TOKENS = 32
SLOW = "4mbit"  # a prompt of 1,500 tokens, 0.75 MB, takes a second and a half


def cluster_file(folder: Path, hosts: Sequence[str]) -> Path:
    """Write a file whose first node only prefills, and whose second only decodes."""
    roles = ("prefill = 1\ndecode = 0\n", "prefill = 0\ndecode = 1\n")
    nodes = [f'[[node]]\nname = "n{i}"\nhost = "{hosts[i]}"\n{roles[i]}' for i in range(2)]
    file = folder / "cluster.toml"
    file.write_text("\n".join(nodes))
    return file


@pytest.fixture
def apart(tmp_path: Path, home: Path, tiny_settings: Settings) -> Callable[..., Any]:
    """Run two nodes on this machine: `with apart(**{"kv.damage_every": 3}) as cluster`."""

    def run(**keys: object) -> Any:
        file = cluster_file(tmp_path, ["127.0.0.1", "localhost"])
        return launch(file, sets=[*tiny_settings(**keys)[1::2]], quiet=False)

    return run


def asked(make_ids: MakeIds, seed: str, count: int, num_tokens: int) -> Asked:
    return [
        {"prompt_token_ids": make_ids((seed, i), num_tokens + 37 * i), "max_tokens": 12, "ignore_eos": True}
        for i in range(count)
    ]


async def answer(client: AsyncClient, fields: dict[str, Any]) -> tuple[int, ...] | str:
    """Return the tokens, or the code of the error that ended it."""
    try:
        return tuple((await client.generate(**fields)).token_ids)
    except PDError as error:
        return error.code


def answers(address: str, asks: Asked, token: str = "") -> list[tuple[int, ...] | str]:
    async def ask() -> list[tuple[int, ...] | str]:
        async with AsyncClient(address, token=token) as client, asyncio.timeout(120):
            return list(await asyncio.gather(*(answer(client, fields) for fields in asks)))

    return asyncio.run(ask())


def moved(client: Client) -> dict[str, int]:
    """Return what the source's migrator has moved."""
    found: dict[str, int] = {a["name"]: a for a in client.status()["actors"]}["n0/migrator"]["moved"]
    return found


def is_clean(client: Client) -> bool:
    status = client.status()
    busy = [a for a in status["actors"] if a["running"] or a["waiting"] or a["kv_blocks"]["leased_out"]]
    return not busy and not status["requests"] and not any(client.leaks().values())


# ---- One machine --------


def test_tokens_are_those_of_one_node_and_what_is_there_is_not_moved_again(
    apart: Any, cluster: Cluster, make_ids: MakeIds, wait: Wait
) -> None:
    asks = asked(make_ids, "moves", 8, 33)
    with apart() as both, Client(both.zmq) as client:
        assert answers(both.zmq, asks) == answers(cluster.zmq, asks)
        wait(lambda: is_clean(client), LOST_S, lambda: f"{client.status()} {client.leaks()}")
        first = moved(client)
        assert first["sequences"] == len(asks)
        num_bytes = sum(len(fields["prompt_token_ids"]) for fields in asks) * 512
        assert first["bytes"] >= num_bytes
        seen, way = Scrape(both), {"path": "ucx", "codec": "none"}
        assert seen.sum("pdactors:migrations_total") == seen.sum("pdactors:handover_seconds_count", **way) == len(asks)
        assert seen.sum("pdactors:handover_kv_bytes_total", **way) == num_bytes
        for direction in ("send", "receive"):
            assert seen.sum("pdactors:transfer_bytes_total", direction=direction, **way) == first["bytes"]
            assert seen.sum("pdactors:transfer_errors_total", direction=direction, **way) == 0
        answers(both.zmq, asks)
        wait(lambda: is_clean(client), LOST_S, lambda: f"{client.status()} {client.leaks()}")
        second = moved(client)
        assert second["sequences"] == 2 * len(asks)
        assert second["bytes"] - first["bytes"] < 0.5 * first["bytes"]


@pytest.mark.parametrize("overlap", ["true", "false"])
def test_long_prompts_move_while_they_are_computed_or_afterwards(
    apart: Any, cluster: Cluster, make_ids: MakeIds, wait: Wait, overlap: str
) -> None:
    asks = asked(make_ids, "long", 4, 1500)
    with apart(**{"kv.overlap": overlap, "engine.chunk_tokens": 128}) as both, Client(both.zmq) as client:
        assert answers(both.zmq, asks) == answers(cluster.zmq, asks)
        wait(lambda: is_clean(client), LOST_S, lambda: f"{client.status()} {client.leaks()}")


def test_damage_on_the_way_is_caught_and_the_text_is_right(
    apart: Any, cluster: Cluster, make_ids: MakeIds, wait: Wait, capfd: pytest.CaptureFixture[str]
) -> None:
    asks = asked(make_ids, "damage", 8, 600)
    with apart(**{"kv.damage_every": 3}) as both, Client(both.zmq) as client:
        assert answers(both.zmq, asks) == answers(cluster.zmq, asks)
        wait(lambda: is_clean(client), LOST_S, lambda: f"{client.status()} {client.leaks()}")
    assert "transfer damaged" in capfd.readouterr().err


# ---- Pruned --------


def pruned_answer(model: PagedModel, prompt: list[int], count: int, share: float) -> list[int]:
    """Return what follows a prompt of whose KV a share was kept once its first token was there."""
    layout = model.layout_for(BLOCK_TOKENS)
    num_blocks = layout.num_blocks(len(prompt))
    packed = range(num_blocks, num_blocks + layout.num_blocks(len(prompt) + count))
    scratch = range(packed.stop, packed.stop + num_scratch(layout, len(prompt)))
    arena = zeros(scratch.stop * layout.block_bytes, np.uint8).reshape(scratch.stop, -1)
    model.bind(arena, layout)
    size, table = len(prompt), range(num_blocks)
    tokens = [int(model.forward(StepBatch(prompt, range(size), [Span(0, size, size, table)], [size - 1])).argmax())]
    kept = prune(model, layout, arena, prompt, table, share, scratch, packed)
    while len(tokens) < count:
        position = size + len(tokens) - 1
        span = Span(0, 1, kept + len(tokens), packed)
        tokens.append(int(model.forward(StepBatch(tokens[-1:], [position], [span], [0])).argmax()))
    return tokens


@pytest.mark.slow
def test_pruned_prompts_move_in_fewer_blocks_and_go_on_at_their_positions(
    apart: Any, cluster: Cluster, tiny_model: Path, make_ids: MakeIds, wait: Wait
) -> None:
    asks = asked(make_ids, "pruned", 6, 300)
    model = load_model(tiny_model, "float32", way="lean")
    expected = [pruned_answer(model, fields["prompt_token_ids"], 12, 0.5) for fields in asks]
    whole = asked(make_ids, "whole", 1, 30)  # takes one block in any case
    right = answers(cluster.zmq, asks)
    with apart(**{"kv.prune": 0.5}) as both, Client(both.zmq) as client:
        assert answers(both.zmq, asks) == [tuple(tokens) for tokens in expected] != right
        wait(lambda: is_clean(client), LOST_S, lambda: f"{client.status()} {client.leaks()}")
        first = moved(client)
        assert (first["sequences"], first["pruned"]) == (len(asks), len(asks))
        assert first["bytes"] <= sum(-(-len(fields["prompt_token_ids"]) // 64) for fields in asks) * 32 * 512
        assert answers(both.zmq, asks) == [tuple(tokens) for tokens in expected]
        assert answers(both.zmq, whole) == answers(cluster.zmq, whole)
        wait(lambda: is_clean(client), LOST_S, lambda: f"{client.status()} {client.leaks()}")
        second = moved(client)
        assert (second["sequences"], second["pruned"]) == (2 * len(asks) + 1, 2 * len(asks))


@pytest.mark.slow
def test_pruned_and_compressed_kv_is_let_go_where_room_is_short_and_clients_leave(
    apart: Any, make_ids: MakeIds, wait: Wait
) -> None:
    asks = [{**fields, "max_tokens": 200} for fields in asked(make_ids, "short", 12, 300)]
    keys = {"kv.prune": 0.6, "kv.compression": "int8", "kv.memory": "1MiB", "model.max_model_len": 1024}

    async def leave(address: str) -> list[tuple[int, ...] | str]:
        async with AsyncClient(address) as client, asyncio.timeout(120):
            asking = [asyncio.create_task(answer(client, fields)) for fields in asks]
            for task in asking[::3]:
                await asyncio.sleep(0.05)
                task.cancel()
            return list(await asyncio.gather(*(task for task in asking if task not in asking[::3])))

    with apart(**keys) as both, Client(both.zmq) as client:
        got = asyncio.run(leave(both.zmq))
        assert all(len(tokens) == 200 for tokens in got), got
        wait(lambda: is_clean(client), LOST_S, lambda: f"{client.status()} {client.leaks()}")
        assert moved(client)["pruned"] > 0


# ---- The way back --------


@pytest.mark.parametrize("mode", ["disaggregated", pytest.param("kvstore", marks=pytest.mark.slow)])
def test_a_conversation_finds_what_was_decoded_on_the_other_node(
    apart: Any, cluster: Cluster, make_ids: MakeIds, wait: Wait, mode: str
) -> None:
    with apart(**{"cluster.mode": mode}) as both, Client(both.zmq) as client, Client(cluster.zmq) as one:
        ids, num_before = make_ids("turn 0", 210), 0
        for turn in range(1, 7):
            fields = {"prompt_token_ids": ids, "max_tokens": 60, "ignore_eos": True}
            answer = client.generate(**fields)
            assert answer.token_ids == one.generate(**fields).token_ids
            assert answer.path == "ucx"
            assert answer.usage.cached_tokens >= 0.9 * num_before
            wait(lambda: is_clean(client), LOST_S, lambda: f"{client.status()} {client.leaks()}")
            num_before = len(ids) + 60
            ids = [*ids, *answer.token_ids, *make_ids(f"turn {turn}", 210)]
        asks = asked(make_ids, mode, 8, 33)
        assert answers(both.zmq, asks) == answers(cluster.zmq, asks)
        wait(lambda: is_clean(client), LOST_S, lambda: f"{client.status()} {client.leaks()}")


# ---- Machines of their own, and a slow wire --------


@pytest.fixture(scope="module")
def slow_hosts() -> Iterator[list[Host]]:
    if why := missing():
        pytest.skip(why)
    with namespaces(2, rate=SLOW) as made:
        yield made


@pytest.fixture
def machines(slow_hosts: list[Host], tmp_path: Path, home: Path, tiny_settings: Settings) -> Iterator[Machines]:
    """Two machines whose wire is slow; the first has the prefill, the second the decode."""
    file = cluster_file(tmp_path, [host.address for host in slow_hosts])
    keys = {
        "router.control": f"tcp://{slow_hosts[0].address}:7300",
        "listen.zmq": f"tcp://{slow_hosts[0].address}:7301",
        "security.token": TOKEN,
        "security.join_token": JOIN_TOKEN,
        **QUICK,
    }
    with Machines(slow_hosts, [str(file), *tiny_settings(**keys)], tmp_path) as both:
        both.launch(0)
        both.launch(1)
        yield both


@contextmanager
def under_way(both: Machines, asks: Asked, wait: Wait) -> Iterator[tuple[Client, list[Any]]]:
    """Ask, and go on in mid-transfer; the answers are there at the block's end."""
    got: list[Any] = []

    def ask() -> None:
        with both.hosts[0].entered():
            got.extend(answers(both.launched[0].ready.zmq, asks, TOKEN))

    asking = Thread(target=ask)
    with both.client() as client:
        asking.start()
        try:
            wait(lambda: pid_of(client, "n0/migrator", "running"), LOST_S, "nothing moves")
            time.sleep(0.3)  # into the first transfers
            yield client, got
        finally:
            asking.join()


def pid_of(client: Client, name: str, what: str = "pid") -> int:
    return next((int(a[what]) for a in client.status()["actors"] if a["name"] == name), 0)


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("name", ["n0/migrator", "n1/migrator"])
def test_a_migrator_that_dies_in_mid_transfer_leaves_no_wrong_token_and_nothing_behind(
    machines: Machines, cluster: Cluster, make_ids: MakeIds, wait: Wait, name: str, how: signal.Signals
) -> None:
    asks = asked(make_ids, "killed", 3, 1500)
    right = answers(cluster.zmq, asks)
    with under_way(machines, asks, wait) as (client, got):
        os.kill(pid_of(client, name), how)
    assert len(got) == len(asks)
    assert all(tokens in (expected, "worker_lost") for tokens, expected in zip(got, right, strict=True)), got
    with machines.client() as client:
        wait(lambda: is_clean(client), LOST_S, lambda: f"{client.status()} {client.leaks()}")
    again = asked(make_ids, "after", 1, 200)
    right = answers(cluster.zmq, again)
    with machines.hosts[0].entered():
        assert answers(machines.launched[0].ready.zmq, again, TOKEN) == right


def test_a_cancel_in_mid_transfer_stops_it_and_the_others_finish(
    machines: Machines, cluster: Cluster, make_ids: MakeIds, wait: Wait
) -> None:
    asks = asked(make_ids, "cancelled", 3, 1200)
    right = answers(cluster.zmq, asks)
    with under_way(machines, asks, wait) as (client, got):
        leaving = {"prompt_token_ids": make_ids("leaving", 1900), "max_tokens": 12, "ignore_eos": True}

        async def leave() -> None:
            async with AsyncClient(machines.launched[0].ready.zmq, token=TOKEN) as other:
                asking = asyncio.create_task(other.generate(**leaving))
                await asyncio.sleep(1.0)
                asking.cancel()

        asyncio.run(leave())
    assert got == right
    with machines.client() as client:
        wait(lambda: is_clean(client), LOST_S, lambda: f"{client.status()} {client.leaks()}")

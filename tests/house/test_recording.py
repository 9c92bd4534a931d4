"""What a real router was told, put to the policies again in another process, leads to every order that it gave."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pdactors import AsyncClient, Client, Cluster, PDError
from pdactors.policy.dispatch import Dispatcher
from pdactors.policy.recording import read

pytestmark = pytest.mark.slow

MakeIds = Callable[[object, int], list[int]]
SIZES = {"node.0.prefill": 2, "node.0.decode": 2, "engine.max_batch": 4, "engine.chunk_tokens": 64}
NUM_ASKED = 24
LONG = {"max_tokens": 1500, "min_tokens": 1400}  # still decodes when its engine is killed
WHOLE_S = 60.0


async def ask(client: AsyncClient, fields: dict[str, Any]) -> None:
    try:
        await client.generate(**fields)
    except PDError as error:
        assert error.code in ("worker_lost", "cancelled"), error  # noqa: PT017 - an answer is as good


async def work(cluster: Cluster, make_ids: MakeIds) -> None:
    """Ask for much at once, half of it with one beginning; leave some of it, and kill a decode engine amid it."""
    beginning = make_ids("beginning", 400)
    prompts = [beginning * (i % 2) + make_ids(("own", i), 20 + 11 * i) for i in range(NUM_ASKED)]
    async with AsyncClient(cluster.zmq) as client, asyncio.timeout(WHOLE_S):
        await ask(client, {"prompt_token_ids": beginning, "max_tokens": 2})
        lengths = [LONG if i < 4 else {"max_tokens": 12} for i in range(NUM_ASKED)]
        asked = [
            asyncio.create_task(ask(client, {"prompt_token_ids": ids, "ignore_eos": True, **length}))
            for ids, length in zip(prompts, lengths, strict=True)
        ]
        await asyncio.wait(asked[4:12])
        for task in asked[20:]:
            task.cancel()
        engines = [actor for actor in (await client.status())["actors"] if actor["role"] == "decode"]
        os.kill(max(engines, key=lambda actor: actor["running"])["pid"], signal.SIGKILL)
        await asyncio.wait(asked)
        for task in asked[:20]:
            task.result()


@pytest.mark.parametrize(
    ("transport", "kinds"),
    [("lease", {"Prefill", "Decode", "Resume", "Release"}), ("ucx", {"Prefill", "Decode", "Migrate", "Resume"})],
)
def test_a_replay_leads_to_the_same_orders(
    start: Any, tmp_path: Path, make_ids: MakeIds, wait: Any, transport: str, kinds: set[str]
) -> None:
    if transport == "ucx":
        pytest.importorskip("ucxx", reason="transfers need ucxx: pip install 'pdactors[ucx]'")
    path = tmp_path / "router"
    with start(**SIZES, **{"kv.transport": transport, "router.record": path}) as cluster:
        asyncio.run(work(cluster, make_ids))
        with Client(cluster.zmq) as client:
            wait(lambda: not client.status()["requests"], WHOLE_S, lambda: f"{client.status()}")
    (recorded,) = tmp_path.glob("router-*")
    assert recorded.stat().st_mode & 0o077 == 0
    limits, stimuli = read(recorded.read_bytes().splitlines())
    dispatcher = Dispatcher(limits)
    for number, stimulus in enumerate(stimuli):
        assert stimulus.put_to(dispatcher) == stimulus.orders, f"{number}: {stimulus.kind}"
        dispatcher.check()
    orders = Counter(type(message).__name__ for stimulus in stimuli for _, message in stimulus.orders)
    assert kinds <= set(orders), orders
    assert orders["Prefill"] > NUM_ASKED
    assert {"lost", "resume", "cancel", "cache_changed", "tick"} <= {stimulus.kind for stimulus in stimuli}

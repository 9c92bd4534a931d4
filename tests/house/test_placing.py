"""Where requests go in a real cluster: near first, evenly among equals, and not all to whoever is empty."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from pdactors import AsyncClient, Cluster, launch

MakeIds = Callable[[object, int], list[int]]
Settings = Callable[..., list[str]]
Start = Callable[..., AbstractContextManager[Cluster]]
MAX_BATCH = 2
THREE_NODES = """
[[node]]
name = "n0"
host = "127.0.0.1"
rack = "r0"
prefill = 1
decode = 1
[[node]]
name = "n1"
host = "127.0.0.1"
rack = "r0"
prefill = 0
decode = 1
[[node]]
name = "n2"
host = "127.0.0.1"
rack = "r1"
prefill = 0
decode = 1
"""


async def decoder_of(client: AsyncClient, request: str) -> str:
    """Return which decode engine answered a request."""
    lanes = (await client.trace(request))["lanes"]
    (name,) = [lane["actor"] for lane in lanes if lane["role"] == "decode" and lane.get("step_at_ms")]
    return str(name)


async def ask(cluster: Cluster, prompts: list[list[int]], max_tokens: int) -> Counter[str]:
    """Ask all at once; return how many answers each decode engine gave."""
    async with AsyncClient(cluster.zmq) as client:
        answers = await asyncio.gather(
            *(client.generate(prompt_token_ids=ids, max_tokens=max_tokens, ignore_eos=True) for ids in prompts)
        )
        return Counter([await decoder_of(client, answer.request) for answer in answers])


async def test_decode_is_on_the_node_of_the_prefill_then_in_its_rack_then_anywhere(
    tmp_path: Path, home: Path, tiny_settings: Settings, make_ids: MakeIds
) -> None:
    pytest.importorskip("ucxx", reason="transfers between nodes need ucxx: pip install 'pdactors[ucx]'")
    file = tmp_path / "cluster.toml"
    file.write_text(THREE_NODES)
    prompts = [make_ids(("near", i), 40) for i in range(3 * MAX_BATCH)]
    with launch(file, sets=tiny_settings(**{"engine.max_batch": MAX_BATCH})[1::2]) as cluster:
        for count, expected in (
            (1, {"n0/decode-0": 1}),
            (MAX_BATCH, {"n0/decode-0": MAX_BATCH}),
            (2 * MAX_BATCH, {"n0/decode-0": MAX_BATCH, "n1/decode-0": MAX_BATCH}),
            (3 * MAX_BATCH, {f"n{i}/decode-0": MAX_BATCH for i in range(3)}),
        ):
            assert await ask(cluster, prompts[:count], 1500) == expected, count


@pytest.mark.parametrize("mode", ["disaggregated", pytest.param("kvstore", marks=pytest.mark.slow)])
async def test_equal_engines_get_equal_shares_and_one_that_was_restarted_no_more(
    start: Start, make_ids: MakeIds, settled: Any, until: Any, mode: str
) -> None:
    keys = {"cluster.mode": mode, "node.0.decode": 2, "engine.max_batch": 64, "kv.memory": "32MiB"}
    with start(**keys) as cluster:
        shares = await ask(cluster, [make_ids(("even", i), 20) for i in range(64)], 300)  # all run together
        assert len(shares) == 2
        assert max(shares.values()) <= 1.3 * min(shares.values()), shares
        async with AsyncClient(cluster.zmq) as client:
            engine = next(a for a in (await client.status())["actors"] if a["name"] == "n0/decode-1")
            os.kill(engine["pid"], signal.SIGKILL)

            def is_back(status: dict[str, Any]) -> bool:
                found = [a for a in status["actors"] if a["name"] == "n0/decode-1" and a["state"] == "ready"]
                return any(actor["incarnation"] > engine["incarnation"] for actor in found)

            await until(client, is_back)
        shares = await ask(cluster, [make_ids(("again", i), 20) for i in range(16)], 300)
        assert 4 <= shares["n0/decode-1"] <= 12, shares
        settled(cluster)

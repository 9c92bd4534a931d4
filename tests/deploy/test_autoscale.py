"""The example that scales prefill and decode apart."""

from __future__ import annotations

import asyncio
import runpy
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
from pages import ROOT

from pdactors import AsyncClient, Cluster

SCRIPT = ROOT / "examples" / "autoscale.py"
EXAMPLE = runpy.run_path(str(SCRIPT))


@pytest.mark.parametrize(
    ("engines", "waiting", "busy", "wanted"),
    [
        (1, 3, 0.9, 2),
        (2, 3, 0.9, 3),
        (3, 3, 0.9, 3),  # no more than that
        (4, 3, 0.9, 4),  # somebody else's doing
        (1, 3, 0.2, 1),  # they wait for the other role
        (1, 0, 0.9, 1),
        (1, 0, 0.0, 1),  # the last one stays
        (2, 0, 0.2, 1),
        (2, 0, 0.3, 2),  # the one that is left would be busy for 0.6
        (2, 1, 0.0, 2),
        (0, 3, 0.0, 0),  # not ready yet
    ],
)
def test_a_role_grows_where_it_is_short_and_shrinks_where_it_is_idle(
    engines: int, waiting: float, busy: float, wanted: int
) -> None:
    assert EXAMPLE["decide"](engines, waiting, busy, 3, 0.8, 0.5) == wanted


def test_the_busy_share_is_that_of_engines_seen_twice() -> None:
    seen = EXAMPLE["Seen"]
    before, now = seen(2, 0, {"a": 10.0, "b": 5.0, "gone": 1.0}), seen(3, 0, {"a": 14.0, "b": 1.0, "new": 9.0})
    assert EXAMPLE["busy_share"](before, now, 5.0) == pytest.approx(0.4)
    assert EXAMPLE["busy_share"](seen(0, 0, {}), now, 5.0) == 0.0


@pytest.mark.slow
async def test_decode_grows_while_requests_wait_for_it_and_shrinks_when_they_are_over(
    start: Callable[..., AbstractContextManager[Cluster]],
) -> None:
    with start(**{"engine.max_batch": 1}) as cluster:
        options = ["--http", f"http://{cluster.http}", "--zmq", cluster.zmq, "--period", "1", "--grow-at", "0.1"]
        scaling = await asyncio.create_subprocess_exec(sys.executable, SCRIPT, *options, stdout=subprocess.PIPE)
        assert scaling.stdout is not None

        async def ask(client: AsyncClient) -> None:
            while True:
                await client.generate("the cat sat on the mat", max_tokens=500, ignore_eos=True)

        try:
            async with asyncio.timeout(90), AsyncClient(cluster.zmq) as client:
                asking = [asyncio.create_task(ask(client)) for _ in range(8)]
                assert (await scaling.stdout.readline()).startswith(b"decode: 1 -> 2")
                assert len([a for a in (await client.status())["actors"] if a["role"] == "decode"]) == 2
                for task in asking:
                    task.cancel()
                await asyncio.gather(*asking, return_exceptions=True)
                assert (await scaling.stdout.readline()).startswith(b"decode: 2 -> 1")
        finally:
            scaling.terminate()
            await scaling.wait()

"""A supervisor whose router is on another machine."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from pdactors.actors import supervisor as module
from pdactors.actors.process import Nursery
from pdactors.actors.router import Router
from pdactors.actors.supervisor import Supervisor
from pdactors.errors import ConnectionLost, Refused
from pdactors.transport.inproc import InprocTransport


@pytest.fixture
def guest(make_spec, monkeypatch):
    """Make a supervisor of n1 that starts nothing and has yet to learn the run."""
    monkeypatch.setattr(module, "become_subreaper", lambda: None)

    def make(**changes):
        spec = make_spec("supervisor", "n1/supervisor", node="n1")
        spec = msgspec.structs.replace(spec, run_id="", **changes)
        return Supervisor(spec, InprocTransport(), [], Nursery("", "float32", 8, ()))

    return make


async def ready(supervisor):
    async with asyncio.timeout(10):
        await supervisor.is_ready.wait()


async def test_it_waits_for_the_router_and_learns_the_run(guest, make_spec, living):
    joining = guest()
    async with living(joining):
        await asyncio.sleep(0.1)
        assert not joining.is_ready.is_set()
        router = Router(make_spec("router"), InprocTransport())
        async with living(router):
            await ready(joining)
            assert joining.spec.run_id == "run"
            assert router.members["n1/supervisor"].node == "n1"


async def test_it_does_not_wait_for_ever(guest, monkeypatch):
    monkeypatch.setattr(module, "ROUTER_WAIT_S", 0.1)
    with pytest.raises(ConnectionLost, match=r"no router answered at inproc://\S+ within 0 s; is node n0 launched"):
        await guest().run()


async def test_a_wrong_join_token_ends_it(guest, make_spec, living):
    async with living(Router(make_spec("router"), InprocTransport())):
        with pytest.raises(Refused, match="router refuses n1/supervisor: join token: wrong or missing"):
            await guest(join_token="guess").run()


async def test_it_ends_when_the_router_is_gone_for_good(guest, make_spec, living, monkeypatch):
    monkeypatch.setattr(module, "ROUTER_GONE_S", 0.3)
    joined = guest(config=_impatient(make_spec("supervisor").config))
    joining = asyncio.create_task(joined.run())
    async with living(Router(make_spec("router"), InprocTransport())):
        await ready(joined)
    with pytest.raises(ConnectionLost, match="run run is over: its router is silent"):
        await asyncio.wait_for(joining, 10)


def _impatient(config):
    return msgspec.structs.replace(config, router=msgspec.structs.replace(config.router, dead_after_ms=60))


async def test_it_ends_with_another_run(guest, make_spec, living):
    joined = guest()
    joining = asyncio.create_task(joined.run())
    async with living(Router(make_spec("router"), InprocTransport())):
        await ready(joined)
    spec = msgspec.structs.replace(make_spec("router", incarnation=2), run_id="next")
    async with living(Router(spec, InprocTransport())):
        with pytest.raises(Refused, match="run: theirs is run, ours is next"):
            await asyncio.wait_for(joining, 10)


async def test_it_leaves_in_order(guest, make_spec, living):
    router = Router(make_spec("router"), InprocTransport())
    async with living(router):
        joined = guest()
        async with living(joined):
            await ready(joined)
        async with asyncio.timeout(10):
            while "n1/supervisor" in router.members:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert not router.liveness.silent(router.clock() + 1e6)

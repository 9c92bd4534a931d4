from __future__ import annotations

import os
from pathlib import Path

import pytest

from pdactors.errors import ConfigError
from pdactors.transport import transport_for


@pytest.mark.parametrize("address", ["carrier-pigeon://a", "127.0.0.1:70", ""])
def test_an_unknown_scheme_names_the_known_ones(address: str):
    with pytest.raises(ConfigError, match="known: tcp, inproc"):
        transport_for(address)


async def test_threads_of_a_transport_run_where_they_are_told():
    def threads() -> set[int]:
        return {int(task.name) for task in Path("/proc/self/task").iterdir()}

    mine, before = os.sched_getaffinity(0), threads()
    core = max(mine)
    transport = transport_for("tcp://", cores=[core])
    try:
        transport.listen("tcp://127.0.0.1:*", lambda *_: None)
        new = threads() - before
        assert new
        assert all(os.sched_getaffinity(thread) == {core} for thread in new)
        assert os.sched_getaffinity(0) == mine
    finally:
        transport.close()

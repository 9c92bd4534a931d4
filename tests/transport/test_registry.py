from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from pdactors.errors import ConfigError
from pdactors.transport import transport_for


@pytest.mark.parametrize("address", ["carrier-pigeon://a", "127.0.0.1:70", ""])
def test_an_unknown_scheme_names_the_known_ones(address: str):
    with pytest.raises(ConfigError, match="known: tcp, inproc"):
        transport_for(address)


async def test_threads_of_a_transport_run_where_they_are_told(wait: Callable[..., None]):
    def theirs() -> set[int]:
        tasks = [(int(task.name), task / "comm") for task in Path("/proc/self/task").iterdir()]
        return {thread for thread, name in tasks if name.exists() and name.read_text().startswith("ZMQ")}

    mine, before = os.sched_getaffinity(0), theirs()
    core = max(mine)
    transport = transport_for("tcp://", cores=[core])
    try:
        transport.listen("tcp://127.0.0.1:*", lambda *_: None)
        # A thread takes its name and its core as its first acts, which may be after its maker's next.
        wait(lambda: len(theirs() - before) == 2, 5.0, lambda: str(theirs() - before))
        wait(lambda: all(os.sched_getaffinity(thread) == {core} for thread in theirs() - before), 5.0, "elsewhere")
        assert os.sched_getaffinity(0) == mine
    finally:
        transport.close()

from __future__ import annotations

import pytest

from pdactors.actors.remains import is_actor


@pytest.mark.parametrize("module", ["pdactors.actors", "pdactors.actors.nursery"])
def test_actors_are_known_by_module_name_run_and_supervisor(module):
    assert is_actor(["/usr/bin/python3", "-m", module, "n0/decode-0", "12345678", "4711"])
    assert is_actor(["python3", "-X", "dev", "-m", module, "gateway", "0a1b2c3d", "1"])


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["python3"],
        ["python3", "-m", "pdactors.actors"],
        ["python3", "-m", "pdactors.actors", "gateway", "12345678"],  # no supervisor: a run that is all digits
        ["python3", "-m", "pdactors.actors", "gateway", "0a1b2c3d", "4711", "more"],
        ["python3", "-m", "pdactors.cli.main", "launch", "12345678", "4711"],
        ["grep", "-r", "pdactors.actors", "a", "1"],
    ],
)
def test_nothing_else_is_taken_for_an_actor(arguments):
    assert not is_actor(arguments)

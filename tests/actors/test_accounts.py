from __future__ import annotations

import pytest

from pdactors.actors.accounts import is_clean, lasting, leaks, status
from pdactors.messages import Blocks, LeaseInfo, Load, Report, Surveyed

CLEAN = {"leases": [], "blocks_unaccounted": 0, "stale_segments": [], "stray_requests": [], "faults": [], "silent": []}


def lease(request: str, expires_s: float) -> dict[str, object]:
    return {"lessor": "p", "holder": "d", "request": request, "attempt": 1, "num_blocks": 2, "expires_s": expires_s}


def test_what_came_back_meanwhile_is_no_leak():
    first = {**CLEAN, "leases": [lease("a", 9.0)], "blocks_unaccounted": 2, "silent": ["n0/p"]}
    assert is_clean(lasting(first, CLEAN))


def test_what_stays_is_a_leak_and_what_is_new_is_not_one_yet():
    first = {**CLEAN, "leases": [lease("a", 9.0), lease("b", 9.0)], "blocks_unaccounted": 3, "faults": ["x"]}
    second = {**CLEAN, "leases": [lease("c", 9.5), lease("a", 8.5)], "blocks_unaccounted": 1, "faults": ["x", "y"]}
    assert lasting(first, second) == {
        **CLEAN,
        "leases": [lease("a", 8.5)],
        "blocks_unaccounted": 1,
        "faults": ["x"],
    }


def report(role, load=None, **fields):
    return Report(f"n0/{role}", role, "n0", "r0", "ready", 1, 1, load or Load(), **fields)


@pytest.mark.parametrize("role", ["prefill", "migrator"])
def test_what_is_held_for_nobody_is_a_leak_whoever_holds_it(role):
    held = Load(blocks=Blocks(total=9, free=6, used=3))
    info = LeaseInfo(f"n0/{role}", "d", "gone", 1, 2, 9.0)
    found = leaks(Surveyed(1, (report(role, held, leases=(info,)), report(role, requests=("gone",))), ("here",), ()))
    assert found["blocks_unaccounted"] == 3
    assert [each["request"] for each in found["leases"]] == ["gone"]
    assert found["stray_requests"] == [{"actor": f"n0/{role}", "request": "gone"}]
    assert is_clean(leaks(Surveyed(1, (report(role, held, requests=("here",)),), ("here",), ())))


def test_a_migrator_says_what_it_moved():
    moved = {"migrations": 2, "migrations_pruned": 1, "migrated_bytes": 77}
    busy, other = report("migrator", counts=moved), report("worker")
    told = status("run", "disaggregated", "tiny", Surveyed(1, (busy, other), (), ()))
    assert told["actors"][0]["moved"] == {"sequences": 2, "pruned": 1, "bytes": 77}
    assert "moved" not in told["actors"][1]

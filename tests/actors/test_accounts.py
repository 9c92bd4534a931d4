from __future__ import annotations

from pdactors.actors.accounts import is_clean, lasting

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

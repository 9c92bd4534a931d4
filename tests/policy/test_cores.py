from __future__ import annotations

import pytest

from pdactors.policy.cores import Cores, assign_cores

APART = [("p0", "prefill"), ("d0", "decode")]


def test_each_engine_has_cores_of_its_own_and_nothing_else_runs_beside_decode():
    assert assign_cores(APART, 1, [0, 1]) == Cores({"p0": (0,), "d0": (1,)}, (0,))
    assert assign_cores(APART, 2, [3, 5, 7, 8, 9]) == Cores({"p0": (3, 5), "d0": (7, 8)}, (3, 5, 9))


def test_workers_share_with_everybody():
    assert assign_cores([("w0", "worker"), ("w1", "worker")], 1, [0, 1]) == Cores({"w0": (0,), "w1": (1,)}, ())


@pytest.mark.parametrize(("threads", "available"), [(1, [0]), (2, [0, 1, 2]), (8, [0, 1])])
def test_too_few_cores_are_left_to_the_kernel(threads, available):
    assert assign_cores(APART, threads, available) == Cores({}, ())


def test_all_cores_for_decode_leave_the_others_nothing_of_their_own():
    assert assign_cores([("d0", "decode"), ("d1", "decode")], 1, [0, 1]).others == ()

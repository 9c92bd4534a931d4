from __future__ import annotations

import pytest

from pdactors.policy.cores import Cores, assign_cores


def apart(threads):
    return [("p0", "prefill", threads), ("d0", "decode", threads)]


def test_each_engine_has_cores_of_its_own_and_nothing_else_runs_beside_decode():
    assert assign_cores(apart(1), [0, 1]) == Cores({"p0": (0,), "d0": (1,)}, (0,))
    assert assign_cores(apart(2), [3, 5, 7, 8, 9]) == Cores({"p0": (3, 5), "d0": (7, 8)}, (3, 5, 9))


def test_workers_share_with_everybody():
    assert assign_cores([("w0", "worker", 1), ("w1", "worker", 1)], [0, 1]) == Cores({"w0": (0,), "w1": (1,)}, ())


@pytest.mark.parametrize(("threads", "available"), [(1, [0]), (2, [0, 1, 2]), (8, [0, 1])])
def test_too_few_cores_are_left_to_the_kernel(threads, available):
    assert assign_cores(apart(threads), available) == Cores({}, ())


def test_all_cores_for_decode_leave_the_others_nothing_of_their_own():
    assert assign_cores([("d0", "decode", 1), ("d1", "decode", 1)], [0, 1]).others == ()


def test_nodes_of_one_machine_may_have_different_numbers_of_threads():
    engines = [("n0/p", "prefill", 2), ("n0/d", "decode", 1), ("n1/d", "decode", 2)]
    assert assign_cores(engines, range(6)) == Cores({"n0/p": (0, 1), "n0/d": (2,), "n1/d": (3, 4)}, (0, 1, 5))

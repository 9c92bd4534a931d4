from __future__ import annotations

import pytest

from pdactors.messages import Member, Scale
from pdactors.policy.scaling import Crew

SEPARATED = ("prefill", "decode")


def crew(*engines, can_migrate=False, draining=()):
    """Make a crew of `node/role` or `node/role-i`, all ready; each node has a supervisor."""
    members = {}
    for name in engines:
        node, _, kind = name.partition("/")
        members[name] = Member(name, kind.partition("-")[0], node, "r0", 1, 1, state="ready")
        members[f"{node}/supervisor"] = Member(f"{node}/supervisor", "supervisor", node, "r0", 1, 1, state="ready")
    return Crew(members, draining, can_migrate=can_migrate)


def scale(crew, node, role, count):
    return crew.scale_objection(Scale(1, node, role, count), SEPARATED, "disaggregated")


TWO = ("n0/prefill-0", "n0/decode-0", "n1/prefill-0", "n1/decode-0")


def test_the_last_decode_beside_a_prefill_stays_unless_kv_can_move():
    assert "prefill engines of n1 need a decode" in crew(*TWO).drain_objection("n1/decode-0")
    assert "prefill engines of n1 need a decode" in scale(crew(*TWO), "n1", "decode", 0)
    assert crew(*TWO, can_migrate=True).drain_objection("n1/decode-0") == ""
    assert scale(crew(*TWO, can_migrate=True), "n1", "decode", 0) == ""


def test_a_second_decode_or_no_prefill_on_the_node_frees_the_first():
    assert crew(*TWO, "n1/decode-1").drain_objection("n1/decode-0") == ""
    assert crew(*TWO, draining={"n1/prefill-0"}).drain_objection("n1/decode-0") == ""
    assert scale(crew(*TWO), "n1", "decode", 1) == ""


def test_a_prefill_is_not_added_where_nobody_could_decode():
    fleet = (*TWO, "n2/decode-0")
    assert scale(crew(*fleet), "n2", "prefill", 1) == ""
    assert "n2 need a decode" in scale(crew(*fleet, draining={"n2/decode-0"}), "n2", "prefill", 1)


def test_the_last_prefill_of_a_node_may_go_while_another_node_has_one():
    assert crew(*TWO).drain_objection("n1/prefill-0") == ""
    assert scale(crew(*TWO), "n1", "prefill", 0) == ""
    assert "the last prefill" in crew("n0/prefill-0", "n0/decode-0").drain_objection("n0/prefill-0")


def test_workers_may_leave_a_node_altogether():
    fleet = crew("n0/worker-0", "n1/worker-0")
    assert fleet.drain_objection("n1/worker-0") == ""
    assert fleet.scale_objection(Scale(1, "n1", "worker", 0), ("worker",), "chunked") == ""


@pytest.mark.parametrize(("node", "role", "part"), [
    ("n7", "decode", "no node is called n7"), ("n0", "worker", "no worker"),
])  # fmt: skip
def test_what_there_is_not_cannot_be_scaled(node, role, part):
    assert part in scale(crew(*TWO), node, role, 1)

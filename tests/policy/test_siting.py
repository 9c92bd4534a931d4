"""What nodes ask of machines, and why there may be none for them."""

from __future__ import annotations

from pdactors.config.cluster import ClusterConfig, ClusterSection, NodeSection
from pdactors.policy.siting import MARK, needs, objection, shown

TWO_RACKS = [
    {"CPU": 4.0, "rack:r0": 1.0, "prefill": 1.0, "decode": 1.0, "router": 1.0, "node:10.0.0.1": 1.0},
    {"CPU": 4.0, "rack:r1": 1.0, "prefill": 1.0, "decode": 4.0, "node:10.0.0.2": 1.0},
]


def asked(*nodes: NodeSection, mode: str = "disaggregated") -> dict[str, dict[str, float]]:
    config = ClusterConfig(cluster=ClusterSection(mode=mode), node=nodes)  # type: ignore[arg-type]
    return {node.name: needs(config, node) for node in nodes}


def test_a_node_asks_for_its_rack_its_engines_and_their_cores_and_the_first_for_the_router() -> None:
    first, second = asked(NodeSection(), NodeSection(name="n1", rack="r1", prefill=0, decode=3, threads=2)).values()
    assert first == {"rack:r0": MARK, "prefill": 1, "decode": 1, "CPU": 2, "router": 1}
    assert second == {"rack:r1": MARK, "decode": 3, "CPU": 6}


def test_roles_follow_the_mode() -> None:
    (wanted,) = asked(NodeSection(prefill=2, decode=1), mode="chunked").values()
    assert wanted == {"rack:r0": MARK, "worker": 3, "CPU": 3, "router": 1}


def test_a_named_machine_and_a_device_are_asked_for_and_loopback_is_any_machine() -> None:
    (wanted,) = asked(NodeSection(host="10.0.0.2", device="cuda:1", threads=0)).values()
    assert wanted["node:10.0.0.2"] == MARK
    assert wanted["GPU"] == 1
    assert wanted["CPU"] == 2, "engines that share the cores out have one each at least"
    assert not [name for name in asked(NodeSection(host="localhost"))["n0"] if name.startswith("node:")]


def test_nodes_that_each_have_a_machine_are_not_objected_to() -> None:
    assert objection(asked(NodeSection(), NodeSection(name="n1", rack="r1", decode=2)), TWO_RACKS) == ""


def test_an_objection_names_the_node_what_it_asks_for_and_what_nobody_has() -> None:
    reason = objection(asked(NodeSection(), NodeSection(name="n1", rack="r9", prefill=2)), TWO_RACKS)
    assert reason == (
        'node "n1" asks for CPU 3, decode 1, prefill 2, rack:r9, and no machine has that much of prefill, rack:r9'
    )


def test_what_only_different_machines_have_is_no_place() -> None:
    reason = objection(asked(NodeSection(rack="r1")), TWO_RACKS)
    assert reason.endswith("rack:r1, router 1, and no machine has all of it")


def test_no_machine_at_all_is_no_place() -> None:
    assert "no machine has that much of CPU, decode, prefill, rack:r0, router" in objection(asked(NodeSection()), [])


def test_resources_are_shown_in_order_and_marks_by_name() -> None:
    assert shown({"rack:r0": MARK, "decode": 2.0, "CPU": 0.5}) == "CPU 0.5, decode 2, rack:r0"

"""Which nodes a launch starts, and where the others are found."""

from __future__ import annotations

import pytest

from pdactors.actors.blueprint import (
    check_available,
    check_memory,
    check_model,
    client_addresses,
    control_address,
    nodes_here,
)
from pdactors.config.cluster import ClusterConfig, ClusterSection, KVSection, ListenSection, NodeSection, RouterSection
from pdactors.engine.shape import ModelShape
from pdactors.errors import ConfigError

NEAR = {"n0": "127.0.0.1", "n1": "127.0.0.1"}


def config(
    *nodes, mode="disaggregated", control="tcp://0.0.0.0:7000", router="n0", listen=None, transport="auto", **kv
):
    return ClusterConfig(
        cluster=ClusterSection(mode=mode),
        listen=listen or ListenSection(),
        kv=KVSection(transport=transport, **kv),
        router=RouterSection(node=router, control=control),
        node=nodes or (NodeSection("n0"), NodeSection("n1")),
    )


def names(nodes):
    return [node.name for node in nodes]


def test_all_nodes_of_this_machine_start_the_routers_first():
    assert names(nodes_here(config(), NEAR, None)) == ["n0", "n1"]
    assert names(nodes_here(config(router="n1"), NEAR, None)) == ["n1", "n0"]
    assert names(nodes_here(config(), {"n1": "10.0.0.2"}, None)) == ["n1"]


def test_the_named_node_starts_alone():
    assert names(nodes_here(config(), NEAR, "n1")) == ["n1"]


@pytest.mark.parametrize(("hosts", "name", "parts"), [
    (NEAR, "n7", ["n7", "n0, n1"]),
    ({"n0": "127.0.0.1"}, "n1", ['node "n1"', "127.0.0.1", "not an address of this machine"]),
    ({}, None, ["no node of the file is on this machine", "n0 at 127.0.0.1"]),
])  # fmt: skip
def test_what_cannot_start_here_is_refused(hosts, name, parts):
    with pytest.raises(ConfigError) as caught:
        nodes_here(config(), hosts, name)
    assert all(part in str(caught.value) for part in parts)


@pytest.mark.parametrize(("hosts", "name"), [(NEAR, "n0"), (NEAR, "n1"), ({"n1": "10.0.0.2"}, None)])
def test_several_launches_need_a_fixed_port(hosts, name):
    with pytest.raises(ConfigError, match=r"router\.control .* fixed port"):
        nodes_here(config(control="tcp://127.0.0.1:0"), hosts, name)


def test_one_launch_of_all_needs_none():
    assert len(nodes_here(config(control="tcp://127.0.0.1:0"), NEAR, None)) == 2


@pytest.mark.parametrize(("control", "found"), [
    ("tcp://10.0.0.9:7000", "10.0.0.9:7000"), ("tcp://0.0.0.0:7000", "10.0.0.1:7000"), ("tcp://*:1", "10.0.0.1:1"),
    ("tcp://[fd00::1]:7", "[fd00::1]:7"),
])  # fmt: skip
def test_the_router_is_found_at_its_nodes_host_where_it_listens_everywhere(control, found):
    assert str(control_address(config(NodeSection("n0", host="10.0.0.1"), control=control))) == found


@pytest.mark.parametrize(("host", "zmq", "found"), [
    ("10.0.0.1", "tcp://10.0.0.1:7071", "tcp://10.0.0.1:7071"), ("10.0.0.1", "0.0.0.0:5", "tcp://10.0.0.1:5"),
    ("10.0.0.1", "tcp://127.0.0.1:7071", ""), ("127.0.0.1", "tcp://127.0.0.1:7071", "tcp://127.0.0.1:7071"),
    ("10.0.0.1", "10.0.0.1:0", ""), ("10.0.0.1", "", ""),
])  # fmt: skip
def test_a_machine_without_gateway_tells_clients_what_the_file_says_if_it_leads_there(host, zmq, found):
    asked = config(NodeSection("n0", host=host), NodeSection("n1", host=host), listen=ListenSection(zmq=zmq))
    assert client_addresses(asked)["zmq"] == found


@pytest.mark.parametrize(("counts", "key"), [({"decode": 0}, "node.1.decode"), ({"prefill": 0}, "node.1.prefill")])
def test_a_node_with_half_of_the_engines_is_refused_where_kv_does_not_move(counts, key):
    halves = NodeSection("n0"), NodeSection("n1", **counts)
    with pytest.raises(ConfigError, match=key):
        check_available(config(*halves, transport="lease"))
    check_available(config(*halves))
    check_available(config(NodeSection("n0"), NodeSection("n1", **counts), mode="chunked"))


def test_a_model_with_sliding_windows_is_refused_where_kv_is_pruned():
    shape = ModelShape("X", 2, 4, 4, 16, 64, 100, 8192, (2,), 1, 1, 0, window=1024)
    with pytest.raises(ConfigError, match=r"kv\.prune = 0\.7: .* a sliding window of 1024 tokens"):
        check_model(config(prune=0.7), shape)
    check_model(config(), shape)
    check_model(config(prune=0.7, transport="lease"), shape)  # nothing moves
    check_model(config(prune=0.7), ModelShape("X", 2, 4, 4, 16, 64, 100, 8192, (2,), 1, 1, 0, window=4096))


@pytest.mark.parametrize(
    ("memory", "available", "advice"),
    [
        ("8GiB", 6 << 30, "kv.memory of at most 1772MiB would fit"),  # two nodes, each with two engines of 600 MiB
        ("100MiB", 2 << 30, "start fewer engines, or take a smaller model"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_would(memory, available, advice):
    shape = ModelShape(
        architecture="LlamaForCausalLM", num_layers=1, num_heads=1, num_kv_heads=1, head_dim=64, hidden_size=64,
        vocab_size=64, max_position=64, eos_ids=(), weight_bytes=0, num_floats=100 << 20, other_bytes=0,
    )  # fmt: skip
    wanted = config(memory=memory)
    with pytest.raises(ConfigError, match=advice):
        check_memory(wanted, wanted.node, shape, available)
    check_memory(config(memory="1772MiB"), wanted.node, shape, 6 << 30)

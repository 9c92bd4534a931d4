from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from pdactors.config import validate
from pdactors.config.load import load
from pdactors.errors import ConfigError

NO_TOKEN = "not on loopback (127.0.0.0/8, ::1), so security.token or security.token_file must be set"
NO_TOKEN_OR_CURVE = (
    "not on loopback (127.0.0.0/8, ::1), so security.token, security.token_file or security.curve must be set"
)
NO_JOIN_TOKEN = (
    "not on loopback (127.0.0.0/8, ::1), so security.join_token, security.join_token_file or security.curve must be set"
)


@dataclass(frozen=True)
class Case:
    sets: tuple[str, ...]
    message: str


WRONG = [
    Case(("kv.block_tokens=24",), "kv.block_tokens = 24: must be a power of two, 8 to 256"),
    Case(("model.max_model_len=31",), "model.max_model_len = 31: must be at least kv.block_tokens = 32"),
    Case(("router.dead_after_ms=500",), "router.dead_after_ms = 500: must be more than router.heartbeat_ms = 500"),
    Case(("router.heartbeat_ms=3000",), "router.dead_after_ms = 2000: must be more than router.heartbeat_ms = 3000"),
    Case(("kv.memory=1023KiB",), 'kv.memory = "1023KiB": must be at least 1MiB'),
    Case(("kv.memory=2 gig",), 'kv.memory: "2 gig" is not a size'),
    Case(("kv.store=mooncake",), 'kv.store = "mooncake": must be "arena" or mooncake://HOST:PORT'),
    Case(("kv.store=mooncake://h",), 'kv.store = "mooncake://h": must be "arena" or mooncake://HOST:PORT'),
    Case(("kv.store=",), 'kv.store = "": must be "arena" or mooncake://HOST:PORT'),
    Case(("listen.tcp=here",), 'listen.tcp: "here" is not an address'),
    Case(("router.control=",), 'router.control: "" is not an address'),
    Case(("listen.http=127.0.0.1:70000",), "the port must be 0 to 65535"),
    Case(("listen.http=localhost:7070",), 'listen.http = "localhost:7070": the same port as listen.tcp'),
    Case(("router.control=127.0.0.1:7071",), 'router.control = "127.0.0.1:7071": the same port as listen.zmq'),
    Case(("listen.tcp=0.0.0.0:7070",), f'listen.tcp = "0.0.0.0:7070": {NO_TOKEN}'),
    Case(("listen.zmq=tcp://*:0",), f'listen.zmq = "tcp://*:0": {NO_TOKEN_OR_CURVE}'),
    Case(("listen.zmq=tcp://*:0", "security.join_token=t"), NO_TOKEN_OR_CURVE),
    Case(("listen.tcp=10.0.0.1:0", "security.curve=true"), f'listen.tcp = "10.0.0.1:0": {NO_TOKEN}'),
    Case(("listen.http=10.0.0.1:0", "security.curve=true"), f'listen.http = "10.0.0.1:0": {NO_TOKEN}'),
    Case(("listen.http=[::]:0", "security.join_token=t"), f'listen.http = "[::]:0": {NO_TOKEN}'),
    Case(("router.control=10.0.0.1:9", "security.token=t"), f'router.control = "10.0.0.1:9": {NO_JOIN_TOKEN}'),
    Case(("node.0.host=10.0.0.1", "security.token=t"), f'node.0.host = "10.0.0.1": {NO_JOIN_TOKEN}'),
    Case(("node.0.host=gpu-box",), f'node.0.host = "gpu-box": {NO_JOIN_TOKEN}'),
    Case(("security.token=t", "security.token_file=/f"), "only one of security.token and security.token_file"),
    Case(("security.join_token=t", "security.join_token_file=/f"), "only one of security.join_token and"),
    Case(("security.token=two words",), 'security.token = "***": must be one word of printable ASCII'),
    Case(("security.join_token=***",), 'security.join_token = "***": stands for a secret'),
    Case(("node.0.prefill=0", "node.0.decode=0"), 'node.0 ("n0"): prefill and decode are 0'),
    Case(("node.0.decode=0",), "node.0.decode = 0: disaggregated mode needs at least one decode actor"),
    Case(("node.0.prefill=0", "cluster.mode=kvstore"), "kvstore mode needs at least one prefill actor"),
    Case(
        ("node.0.prefill=0", "node.0.decode=0", "cluster.mode=chunked"),
        'node.0 ("n0"): workers, prefill and decode are 0',
    ),
    Case(("router.node=n7",), 'router.node = "n7": no node has this name; known: n0'),
    Case(("node.0.name=a/b", "router.node=a/b"), 'node.0.name = "a/b": must be letters'),
    Case(("node.0.name=1", "router.node=1"), 'node.0.name = "1": must be letters'),
    Case(("node.0.rack=",), 'node.0.rack = "": must be letters'),
    Case(
        ("node.0.host=0.0.0.0", "security.join_token=t"),
        'node.0.host = "0.0.0.0": must be the name or the IP address of one machine',
    ),
    Case(("node.0.host=10.0.0", "security.join_token=t"), 'node.0.host = "10.0.0": must be the name'),
    Case(("node.0.device=gpu",), 'node.0.device = "gpu": must be cpu, cuda or cuda:N'),
    Case(("node.0.ucx_ports=9-8",), 'node.0.ucx_ports: "9-8" is not a range'),
]

RIGHT = [
    ("kv.block_tokens=8", "model.max_model_len=8"),
    ("kv.block_tokens=256",),
    ("kv.store=mooncake://10.0.0.1:50051", "cluster.mode=kvstore"),
    ("listen.tcp=", "listen.zmq=", "listen.http="),
    ("listen.tcp=127.0.0.1:0", "listen.zmq=127.0.0.1:0", "listen.http=[::1]:0"),
    ("listen.tcp=127.0.0.1:7080", "listen.http=127.0.0.2:7080"),
    ("listen.tcp=0.0.0.0:7070", "security.token=t"),
    ("listen.http=[::]:7080", "security.token_file=/run/token"),
    ("listen.zmq=tcp://*:0", "security.curve=true"),
    ("router.control=0.0.0.0:9000", "node.0.host=10.0.0.1", "security.curve=true"),
    ("router.control=0.0.0.0:9000", "node.0.host=10.0.0.1", "security.join_token_file=/run/token"),
    ("router.control=0.0.0.0:9000", "node.0.host=10.0.0.1", "security.join_token=t"),
    ("node.0.prefill=0", "node.0.decode=0", "node.0.workers=1", "cluster.mode=colocated"),
    ("node.0.decode=0", "cluster.mode=chunked"),
    ("node.0.device=cuda:3",),
]


@pytest.mark.parametrize("case", WRONG, ids=lambda case: " ".join(case.sets))
def test_what_does_not_fit_is_refused_with_key_value_and_limit(case: Case) -> None:
    with pytest.raises(ConfigError) as caught:
        load(None, sets=case.sets, environ={})
    assert case.message in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("sets", RIGHT, ids=" ".join)
def test_what_fits_is_accepted(sets: tuple[str, ...]) -> None:
    validate(load(None, sets=sets, environ={}))


def two_nodes(tmp_path: Path, second: str, *sets: str) -> str:
    file = tmp_path / "cluster.toml"
    file.write_text(f'[[node]]\nname = "a"\n[[node]]\nname = "b"\n{second}\n')
    with pytest.raises(ConfigError) as caught:
        load(file, sets=["router.node=a", *sets], environ={})
    return str(caught.value)


def test_nodes_of_one_name_are_refused_at_the_second_one(tmp_path: Path) -> None:
    message = two_nodes(tmp_path, "", "node.b.name=a")
    assert message == '--set node.b.name=a: node.1.name = "a": the same name as node.0.name; names must differ'


def test_a_node_on_another_machine_needs_a_control_address_that_leads_to_the_router(tmp_path: Path) -> None:
    message = two_nodes(tmp_path, 'host = "10.0.0.2"', "security.join_token=t")
    assert 'router.control = "tcp://127.0.0.1:0": node.1.host = 10.0.0.2 is another machine' in message
    port_0 = two_nodes(tmp_path, 'host = "10.0.0.2"', "security.join_token=t", "router.control=10.0.0.1:0")
    assert "a fixed port" in port_0


def test_prefill_and_decode_may_be_on_different_nodes(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text('[[node]]\nname = "n0"\ndecode = 0\n[[node]]\nname = "n1"\nprefill = 0\n')
    assert len(load(file, environ={}).node) == 2


def test_every_problem_is_reported_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        load(None, sets=["kv.block_tokens=24", "router.node=x", "node.0.device=y"], environ={})
    assert len(str(caught.value).splitlines()) == 3

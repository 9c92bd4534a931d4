from __future__ import annotations

from pdactors.bench.free_ports import free_ports
from pdactors.config.load import load


def test_a_cluster_moves_to_free_ports_of_the_same_hosts():
    sets = ["listen.tcp=[::1]:7000", "listen.http=", "listen.zmq=", "router.control=tcp://127.0.0.2:9000"]
    config = load(None, sets=[*sets, *free_ports(load(None, sets=sets))])
    assert (config.listen.tcp, config.listen.http) == ("[::1]:0", "")
    assert (config.listen.zmq, config.router.control) == ("tcp://127.0.0.1:0", "tcp://127.0.0.2:0")

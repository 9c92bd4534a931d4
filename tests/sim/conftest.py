"""A small simulated cluster, and loads for it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest

from pdactors.bench.workload import WORKLOADS, Request, arrive, make_requests
from pdactors.config.load import load
from pdactors.sim.cluster import SimCluster
from pdactors.sim.cost import roofline
from pdactors.sim.hardware import HARDWARE
from pdactors.sim.shapes import ModelSize

MODEL = ModelSize.find("smollm2-135m")
TWO_NODES = """
[router]
control = "tcp://10.0.0.1:7000"
[security]
join_token = "of-the-cluster"
[[node]]
name = "n0"
host = "10.0.0.1"
decode = 0
[[node]]
name = "n1"
host = "10.0.0.2"
prefill = 0
"""


@pytest.fixture
def two_nodes(tmp_path):
    path = tmp_path / "two.toml"
    path.write_text(TWO_NODES)
    return path


@pytest.fixture
def make_cluster() -> Callable[..., SimCluster]:
    def make(file=None, *sets: str, **options: bool) -> SimCluster:
        sets = ("listen.tcp=", "listen.zmq=", "listen.http=", *sets)
        return SimCluster(load(file, sets=sets), MODEL, roofline(MODEL, "bfloat16", HARDWARE["cpu"]), **options)

    return make


def some(count: int, rate: float, workload: str = "mixed", seed: str = "1") -> Iterator[Request]:
    made = make_requests(WORKLOADS[workload], range(1000), seed)
    return itertools.islice(arrive(made, rate, seed), count)

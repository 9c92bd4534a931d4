"""The simulator at size: a thousand engines in a hundred racks, a million requests; time and memory of this process.

Five nodes a rack, a prefill and a decode engine each, Llama-3-8B by the data sheet of an A100-80G. Requests are those
of a workload, Poisson. Prints one JSON object, and a line every 50,000 requests.

    .venv/bin/python benchmarks/sim_scale.py [--requests 1000000] [--rate 2500] [--mode disaggregated]
"""

from __future__ import annotations

import argparse
import itertools
import json
import resource
import sys
import time

from msgspec.structs import replace

from pdactors.bench.figures import Objective, figures, seconds_of
from pdactors.bench.load import Record
from pdactors.bench.measure import PATIENCE_S
from pdactors.bench.workload import WORKLOADS, arrive, make_requests
from pdactors.config.cluster import ClusterConfig, NodeSection
from pdactors.config.load import load
from pdactors.sim.cluster import SimCluster
from pdactors.sim.cost import roofline
from pdactors.sim.hardware import find_hardware
from pdactors.sim.shapes import ModelSize

RACKS, NODES_A_RACK = 100, 5
EVERY = 50_000


def configured(mode: str) -> ClusterConfig:
    """Return a cluster of 500 nodes."""
    sets = [f"cluster.mode={mode}", "model.path=llama-3-8b", "kv.memory=48GiB", "router.max_queue=100000"]
    nodes = tuple(
        NodeSection(f"n{rack}-{i}", host=f"10.{rack}.0.{i + 1}", rack=f"r{rack}")
        for rack in range(RACKS)
        for i in range(NODES_A_RACK)
    )
    return replace(load(None, sets=sets), node=nodes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--rate", type=float, default=2500.0)
    parser.add_argument("--mode", default="disaggregated")
    parser.add_argument("--workload", default="chat", choices=sorted(WORKLOADS))
    options = parser.parse_args()
    config, model = configured(options.mode), ModelSize.find("llama-3-8b")
    cost = roofline(model, config.model.dtype, find_hardware("a100-80g"))
    cluster = SimCluster(config, model, cost, wants_gaps=False)
    began_s, spent_s = time.monotonic(), time.process_time()
    number = itertools.count(1)

    def tell(_record: Record) -> bool:
        count = next(number)
        if count % EVERY == 0:
            memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
            print(f"{count} requests, {time.monotonic() - began_s:.0f} s, {memory:.2f} GiB", file=sys.stderr)
        return False

    made = make_requests(WORKLOADS[options.workload], range(model.vocab_size), "1")
    asked = itertools.islice(arrive(made, options.rate, "1"), options.requests)
    records = cluster.run(asked, patience_s=PATIENCE_S, is_enough=tell)
    took_s, cpu_s = time.monotonic() - began_s, time.process_time() - spent_s
    seconds = seconds_of(records)
    found = figures(records, seconds, Objective())
    result = {
        "engines": len(cluster.engines),
        "requests": len(records),
        "failed": sum(record.error is not None for record in records),
        "wall_s": round(took_s, 1),
        "cpu_s": round(cpu_s, 1),
        "us_a_request": round(1e6 * took_s / len(records)),
        "memory_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
        "simulated_s": round(seconds, 1),
        "steps": sum(engine.num_steps for engine in cluster.engines.values()),
        "ttft_p50_ms": found.ttft_ms and found.ttft_ms.p50,
        "tpot_p50_ms": found.tpot_ms and found.tpot_ms.p50,
    }
    cluster.check()
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()

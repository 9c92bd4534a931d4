"""Machines of a Ray cluster, which are loopback addresses of this one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psutil
import pytest

ROLES = {"prefill": 2, "decode": 2, "worker": 2}
QUICK = {  # how soon Ray takes a machine for lost; it has 15 seconds by default
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 2000,
    "health_check_failure_threshold": 3,
}


class RayMachines:
    """Ray's own stand-in for a cluster; the first machine has its head."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        self._cluster = Cluster()
        self.address = ""
        self._added = 0

    def add(self, rack: str, **resources: float) -> Any:
        """Add a machine, with room for two engines of each role."""
        self._added += 1
        first = {"_system_config": QUICK} if self._added == 1 else {}
        machine = self._cluster.add_node(
            num_cpus=4,
            resources={f"rack:{rack}": 1, **ROLES, **resources},
            node_ip_address=f"127.0.0.{10 + self._added}",
            object_store_memory=80 << 20,
            include_dashboard=False,
            **first,
        )
        self.address = self._cluster.address
        return machine

    def of_process(self, pid: int) -> Any:
        """Return the machine that a process runs on."""
        parents = {parent.pid for parent in psutil.Process(pid).parents()}
        for machine in self._cluster.list_all_nodes():
            (raylet,) = machine.all_processes["raylet"]
            if raylet.process.pid in parents:
                return machine
        raise LookupError(f"process {pid} belongs to no machine")

    def kill(self, machine: Any) -> None:
        """Kill all that Ray runs on a machine; its workers notice and die."""
        self._cluster.remove_node(machine, allow_graceful=False)

    def close(self) -> None:
        self._cluster.shutdown()


def ray_machines() -> Iterator[RayMachines]:
    """Three machines in two racks, which launches find by RAY_ADDRESS."""
    pytest.importorskip("ray", reason="the Ray launcher needs ray: pip install 'pdactors[ray]'")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        machines = RayMachines()
        for rack, resources in (("r0", {"router": 4}), ("r0", {}), ("r1", {})):
            machines.add(rack, **resources)
        patch.setenv("RAY_ADDRESS", machines.address)
        yield machines
        machines.close()

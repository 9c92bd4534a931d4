"""What a node of the cluster file asks of the machine that it is put on, and why none can give that. Pure.

Machines offer resources by name, as Ray counts them: `CPU`, `GPU`, and what their owner names: `rack:R`, `router`,
`prefill`, `decode`, `worker`; `node:ADDRESS` is the machine itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pdactors.config.address import is_loopback
from pdactors.config.cluster import ClusterConfig, NodeSection

MARK = 0.001  # of what a machine is or has, which any number of nodes may share


def needs(config: ClusterConfig, node: NodeSection) -> dict[str, float]:
    """Return what a node takes of a machine: engines by role, their cores, its rack, the machine if one is named."""
    engines = node.engines(config.cluster.mode)
    wanted = {f"rack:{node.rack}": MARK, **{str(role): float(count) for role, count in engines.items()}}
    wanted["CPU"] = sum(engines.values()) * max(1, node.threads)
    if node.device != "cpu":
        wanted["GPU"] = 1
    if node.name == config.router.node:
        wanted["router"] = 1
    if not is_loopback(node.host):
        wanted[f"node:{node.host}"] = MARK
    return wanted


def objection(asked: Mapping[str, Mapping[str, float]], offered: Sequence[Mapping[str, float]]) -> str:
    """Say which nodes none of these machines could hold even if nothing else were on it, and why; "" if each has one.

    That all of them find room together, and at this moment, is for whoever places them to find out.
    """
    return "; ".join(
        f'node "{name}" asks for {shown(wanted)}, and {_why(wanted, offered)}'
        for name, wanted in asked.items()
        if not any(_missing(wanted, machine) == [] for machine in offered)
    )


def shown(resources: Mapping[str, float]) -> str:
    """Write resources for people: marks by their name alone."""
    return ", ".join(name if amount == MARK else f"{name} {amount:g}" for name, amount in sorted(resources.items()))


def _why(wanted: Mapping[str, float], offered: Sequence[Mapping[str, float]]) -> str:
    nowhere = [name for name in sorted(wanted) if all(name in _missing(wanted, machine) for machine in offered)]
    if nowhere:
        return f"no machine has that much of {', '.join(nowhere)}"
    return "no machine has all of it"


def _missing(wanted: Mapping[str, float], machine: Mapping[str, float]) -> list[str]:
    return [name for name, amount in wanted.items() if machine.get(name, 0) < amount]

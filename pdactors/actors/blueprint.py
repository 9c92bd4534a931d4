"""What a cluster file amounts to on this machine: which actors, with which slots, memory and limits. Pure."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pdactors.actors.spec import ActorSpec, Descriptors, ModelSpec
from pdactors.config.address import Address, is_loopback, parse_address
from pdactors.config.cluster import ClusterConfig, NodeSection
from pdactors.config.keys import CurveKeys
from pdactors.config.memory import format_size
from pdactors.engine.shape import ModelShape
from pdactors.errors import ConfigError, PDError
from pdactors.kv.layout import KVLayout
from pdactors.messages import Role
from pdactors.policy import extents
from pdactors.policy.cores import Cores, assign_cores

ENGINE_OVERHEAD_BYTES = 600 << 20  # libraries, activations and scratch of one engine process
SMALL_ARENA_BYTES = 64 << 20  # less is nothing that one would be advised to
MAX_EXTENT_BLOCKS = 64
SPARE_SLOTS = 16  # for engines that are added while the cluster runs
SPARE_LEASES = 64  # an engine may lend more than once for a request


def check_available(config: ClusterConfig) -> None:
    """Refuse what this version cannot do, instead of doing something else.

    Raises:
        ConfigError: names the key.
    """
    unavailable = [
        (config.kv.transport == "cuda_ipc", "kv.transport 'cuda_ipc'", "auto, lease or ucx"),
        (config.has_store and config.kv.prune != 1.0, f"kv.prune {config.kv.prune} in mode kvstore", "1.0"),
        (any(node.device != "cpu" for node in config.node), "a node.device other than cpu", "cpu"),
    ]
    for is_asked, what, instead in unavailable:
        if is_asked:
            raise ConfigError(f"{what} is not available in this version; use {instead}")
    _check_reach(config)


def _check_reach(config: ClusterConfig) -> None:
    """Refuse nodes on which prefill or decode is alone, where KV does not move between nodes."""
    if config.kv.transport != "lease":
        return
    for index, node in enumerate(config.node):
        roles = node.engines(config.cluster.mode)
        missing = "decode" if not roles.get("decode") else "prefill" if not roles.get("prefill") else ""
        if config.is_separated and missing:
            raise ConfigError(
                f'node.{index}.{missing} = 0: in mode {config.cluster.mode} node "{node.name}" needs prefill and '
                'decode engines of its own, since kv.transport is "lease"'
            )


def nodes_here(config: ClusterConfig, hosts: Mapping[str, str], name: str | None) -> list[NodeSection]:
    """Return the nodes that a launch starts, the router's first: the named one, or all that are on this machine.

    `hosts` has the address of each node that is on this machine.

    Raises:
        ConfigError: there is none, it is on another machine, or those that are left out cannot find the router.
    """
    if name is not None and config.node_named(name).name not in hosts:
        host = config.node_named(name).host
        raise ConfigError(f'node "{name}": its host {host} is not an address of this machine')
    here = [node for node in config.node if node.name in hosts and name in (None, node.name)]
    elsewhere = [node.name for node in config.node if node not in here]
    if not here:
        known = ", ".join(f"{node.name} at {node.host}" for node in config.node)
        raise ConfigError(f"no node of the file is on this machine: {known}")
    if elsewhere and parse_address(config.router.control).port == 0:
        raise ConfigError(
            f'router.control = "{config.router.control}": nodes are started by several launches (not by this one: '
            f"{', '.join(elsewhere)}), so a fixed port is needed"
        )
    return sorted(here, key=lambda node: node.name != config.router.node)


def control_address(config: ClusterConfig) -> Address:
    """Return where another machine finds the router."""
    return _reachable(config, config.router.control)


def client_addresses(config: ClusterConfig) -> dict[str, str]:
    """Return where clients find the gateway from a machine without it: "" where the file does not say, or it is off."""
    is_here = all(is_loopback(node.host) for node in config.node)

    def shown(text: str, scheme: str) -> str:
        address = _reachable(config, text) if text else None
        if address is None or address.port == 0 or (address.is_loopback and not is_here):
            return ""
        return f"{scheme}{address}"

    return {
        "tcp": shown(config.listen.tcp, ""),
        "zmq": shown(config.listen.zmq, "tcp://"),
        "http": shown(config.listen.http, ""),
    }


def _reachable(config: ClusterConfig, text: str) -> Address:
    address = parse_address(text)
    return Address(config.node_named(config.router.node).host, address.port) if address.is_wildcard else address


def check_model(config: ClusterConfig, shape: ModelShape) -> None:
    """Raise ConfigError if the model cannot hold sequences as long as the file promises, or do what it asks for."""
    if config.model.max_model_len > shape.max_position:
        raise ConfigError(
            f"model.max_model_len = {config.model.max_model_len}: this model has {shape.max_position} positions"
        )
    if config.prunes and 0 < shape.window < config.model.max_model_len:
        raise ConfigError(
            f"kv.prune = {config.kv.prune}: layers of this model see a sliding window of {shape.window} tokens, "
            "which is not known once tokens are left out; use 1.0"
        )


def check_memory(config: ClusterConfig, nodes: Sequence[NodeSection], shape: ModelShape, available: int) -> None:
    """Hold the weights, and the arenas of the nodes that start here, against what the machine has.

    Raises:
        ConfigError: they do not fit; names every part.
    """
    engines = sum(sum(node.engines(config.cluster.mode).values()) for node in nodes)
    weights = shape.weight_bytes_as(config.model.dtype)
    added = config.kv.store_bytes if config.mooncake else 0
    needed = weights + engines * ENGINE_OVERHEAD_BYTES + len(nodes) * (config.kv.memory_bytes + added)
    if needed > available:
        raise ConfigError(
            f"kv.memory = {config.kv.memory!r}: {format_size(needed)} are needed ({format_size(weights)} "
            f"of weights, {engines} engines with {format_size(ENGINE_OVERHEAD_BYTES)} of working memory each, "
            f"{len(nodes)} arenas of {format_size(config.kv.memory_bytes)}"
            f"{f', {format_size(added)} of each node for kv.store' if added else ''}); "
            f"{format_size(available)} are available; {_what_would_fit(config, len(nodes), available - needed)}"
        )


def _what_would_fit(config: ClusterConfig, num_nodes: int, excess: int) -> str:
    """Say what to change where `excess`, below 0, bytes are left."""
    fitting = config.kv.memory_bytes + excess // num_nodes
    if fitting >= SMALL_ARENA_BYTES:
        return f"kv.memory of at most {fitting >> 20}MiB would fit"
    return "start fewer engines, or take a smaller model"


@dataclass(frozen=True)
class ArenaPlan:
    """The sizes of one node's arena."""

    layout: KVLayout
    num_blocks: int
    extent_blocks: int
    num_slots: int
    leases_per_slot: int
    max_lease_blocks: int


def plan_arena(config: ClusterConfig, node: NodeSection, shape: ModelShape) -> ArenaPlan:
    """Divide a node's KV memory.

    Raises:
        ConfigError: kv.memory does not hold a few blocks for each engine.
    """
    layout = KVLayout(shape.num_layers, shape.num_kv_heads, shape.head_dim, config.kv.block_tokens, config.model.dtype)
    engines = sum(node.engines(config.cluster.mode).values())
    num_blocks = config.kv.memory_bytes // layout.block_bytes
    if num_blocks < 2 * engines:
        least = format_size(2 * engines * layout.block_bytes)
        raise ConfigError(f"kv.memory = {config.kv.memory!r}: {engines} engines need {least} at least (2 blocks each)")
    return ArenaPlan(
        layout=layout,
        num_blocks=num_blocks,
        extent_blocks=_extent_blocks(config, num_blocks, engines),
        num_slots=engines + SPARE_SLOTS + 1,  # the last one is the migrator's
        leases_per_slot=config.engine.max_batch * (engines + 1) + SPARE_LEASES,
        max_lease_blocks=layout.num_blocks(config.model.max_model_len),
    )


def _extent_blocks(config: ClusterConfig, num_blocks: int, engines: int) -> int:
    if config.has_store:  # which blocks are given to one by one
        return 1
    return max(1, min(MAX_EXTENT_BLOCKS, num_blocks // (16 * engines)))


def check_room(spec: ActorSpec, engines: int) -> None:
    """Hold one more engine, so that there are `engines`, against the arena that was planned for `spec.num_engines`.

    Raises:
        PDError: not all of them could have what each must have.
    """
    num_blocks = spec.config.kv.memory_bytes // spec.layout.block_bytes
    extent_blocks = _extent_blocks(spec.config, num_blocks, spec.num_engines)
    num_extents = -(-num_blocks // extent_blocks)
    per_sequence = -(-spec.layout.num_blocks(spec.model.max_model_len) // extent_blocks)
    minimum = extents.guaranteed(num_extents, spec.num_owners, per_sequence)
    if (engines + spec.config.moves_kv) * minimum > num_extents:
        sure = minimum * extent_blocks * spec.layout.block_tokens
        raise PDError(
            f"kv.memory = {spec.config.kv.memory!r} has no room for another engine on {spec.node}: "
            f"each is sure of {sure} tokens, for one sequence of model.max_model_len or an even share"
        )


@dataclass(frozen=True)
class Run:
    """What all actors of a run have in common on this machine."""

    run_id: str  # "" until the router says it
    config: ClusterConfig
    model: ModelSpec
    layout: KVLayout
    control: str
    join_token: str = field(repr=False)
    supervisor_pid: int
    hosts: Mapping[str, str]  # IP address of each node that is on this machine
    keys: CurveKeys | None = None

    def engines(self, node: NodeSection) -> list[tuple[str, Role, int]]:
        """Return name, role and threads of a node's engines."""
        roles, threads = node.engines(self.config.cluster.mode), self.threads(node)
        return [(f"{node.name}/{role}-{i}", role, threads) for role, count in roles.items() for i in range(count)]

    def threads(self, node: NodeSection) -> int:
        """Return how many threads an engine of the node has; by default the machine's cores are shared out evenly."""
        count = sum(sum(other.engines(self.config.cluster.mode).values()) for other in self._nodes())
        return node.threads or max(1, (os.cpu_count() or 1) // max(1, count))

    def cores(self) -> Cores:
        """Share the machine's cores out among the engines of all its nodes, whichever launch starts them."""
        engines = [engine for node in self._nodes() for engine in self.engines(node)]
        return assign_cores(engines, sorted(os.sched_getaffinity(0)))

    def _nodes(self) -> list[NodeSection]:
        return [node for node in self.config.node if node.name in self.hosts]


def plan_actors(run: Run, node: NodeSection, fds: Descriptors) -> list[ActorSpec]:
    """Return the actors of a node, those that others need first; router and gateway on the router's node.

    Each gets the descriptors that concern it. Incarnations are 0 here; each start gives a new one.
    """
    config = run.config
    engines = run.engines(node)
    cores = run.cores()

    def spec(name: str, role: Role, own: Descriptors, slot: int = -1) -> ActorSpec:
        return ActorSpec(
            run_id=run.run_id,
            name=name,
            role=role,
            node=node.name,
            rack=node.rack,
            slot=slot,
            incarnation=0,
            supervisor_pid=run.supervisor_pid,
            config=config,
            model=run.model,
            layout=run.layout,
            control=run.control,
            join_token=run.join_token,
            keys=run.keys,
            host=run.hosts[node.name],
            fds=own,
            num_engines=len(engines),
            threads=run.threads(node),
            cores=cores.engines.get(name, cores.others),
            io_cores=cores.others,
        )

    actors = []
    if node.name == config.router.node:
        actors.append(spec("router", "router", Descriptors(control=fds.control)))
        actors.append(spec("gateway", "gateway", Descriptors(tcp=fds.tcp, zmq=fds.zmq, http=fds.http)))
    arena = Descriptors(arena=fds.arena)
    actors.append(spec(f"{node.name}/migrator", "migrator", arena, len(engines) + SPARE_SLOTS))
    actors += [spec(name, role, arena, slot) for slot, (name, role, _) in enumerate(engines)]
    return actors

"""What a cluster file amounts to on this machine: which actors, with which slots, memory and limits. Pure."""

from __future__ import annotations

import os
from dataclasses import dataclass

from pdactors.actors.spec import ActorSpec, Descriptors, ModelSpec
from pdactors.config.cluster import ClusterConfig, NodeSection
from pdactors.config.memory import format_size
from pdactors.engine.shape import ModelShape
from pdactors.errors import ConfigError, PDError
from pdactors.kv.layout import KVLayout
from pdactors.messages import Role
from pdactors.policy import extents
from pdactors.policy.cores import assign_cores

ENGINE_OVERHEAD_BYTES = 600 << 20  # libraries, activations and scratch of one engine process
MAX_EXTENT_BLOCKS = 64
SPARE_SLOTS = 16  # for engines that are added while the cluster runs
SPARE_LEASES = 64  # an engine may lend more than once for a request


def check_available(config: ClusterConfig) -> None:
    """Refuse what this version cannot do, instead of doing something else.

    Raises:
        ConfigError: names the key.
    """
    unavailable = [
        (config.cluster.mode == "kvstore", "cluster.mode 'kvstore'", "disaggregated, chunked or colocated"),
        (len(config.node) > 1, f"{len(config.node)} nodes", "one [[node]]"),
        (config.kv.transport in ("cuda_ipc", "ucx"), f"kv.transport {config.kv.transport!r}", "auto or lease"),
        (config.kv.compression != "none", f"kv.compression {config.kv.compression!r}", "none"),
        (config.kv.prune != 1.0, f"kv.prune {config.kv.prune}", "1.0"),
        (config.security.curve, "security.curve true", "false"),
        (config.router.local_prefill_tokens > 0, "router.local_prefill_tokens above 0", "0"),
        (any(node.device != "cpu" for node in config.node), "a node.device other than cpu", "cpu"),
    ]
    for is_asked, what, instead in unavailable:
        if is_asked:
            raise ConfigError(f"{what} is not available in this version; use {instead}")


def check_model(config: ClusterConfig, shape: ModelShape) -> None:
    """Raise ConfigError if the model cannot hold sequences as long as the file promises."""
    if config.model.max_model_len > shape.max_position:
        raise ConfigError(
            f"model.max_model_len = {config.model.max_model_len}: this model has {shape.max_position} positions"
        )


def check_memory(config: ClusterConfig, shape: ModelShape, available: int) -> None:
    """Hold weights and arenas against what the machine, or its control group, has.

    Raises:
        ConfigError: they do not fit; names every part.
    """
    engines = sum(sum(node.engines(config.cluster.mode).values()) for node in config.node)
    weights = shape.weight_bytes_as(config.model.dtype)
    needed = weights + engines * ENGINE_OVERHEAD_BYTES + len(config.node) * config.kv.memory_bytes
    if needed > available:
        raise ConfigError(
            f"kv.memory = {config.kv.memory!r}: {format_size(needed)} are needed ({format_size(weights)} "
            f"of weights, {engines} engines with {format_size(ENGINE_OVERHEAD_BYTES)} of working memory each, "
            f"{len(config.node)} arenas of {format_size(config.kv.memory_bytes)}); "
            f"{format_size(available)} are available"
        )


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
        extent_blocks=_extent_blocks(num_blocks, engines),
        num_slots=engines + SPARE_SLOTS,
        leases_per_slot=config.engine.max_batch * (engines + 1) + SPARE_LEASES,
        max_lease_blocks=layout.num_blocks(config.model.max_model_len),
    )


def _extent_blocks(num_blocks: int, engines: int) -> int:
    return max(1, min(MAX_EXTENT_BLOCKS, num_blocks // (16 * engines)))


def check_room(spec: ActorSpec, engines: int) -> None:
    """Hold one more engine, so that there are `engines`, against the arena that was planned for `spec.num_engines`.

    Raises:
        PDError: not all of them could have what each must have.
    """
    num_blocks = spec.config.kv.memory_bytes // spec.layout.block_bytes
    extent_blocks = _extent_blocks(num_blocks, spec.num_engines)
    num_extents = -(-num_blocks // extent_blocks)
    per_sequence = -(-spec.layout.num_blocks(spec.model.max_model_len) // extent_blocks)
    minimum = extents.guaranteed(num_extents, spec.num_engines, per_sequence)
    if engines * minimum > num_extents:
        sure = minimum * extent_blocks * spec.layout.block_tokens
        raise PDError(
            f"kv.memory = {spec.config.kv.memory!r} has no room for another engine on {spec.node}: "
            f"each is sure of {sure} tokens, for one sequence of model.max_model_len or an even share"
        )


@dataclass(frozen=True)
class Run:
    """What all actors of a run have in common."""

    run_id: str
    config: ClusterConfig
    model: ModelSpec
    layout: KVLayout
    control: str
    join_token: str
    supervisor_pid: int
    ready_file: str = ""


def plan_actors(run: Run, node: NodeSection, fds: Descriptors) -> list[ActorSpec]:
    """Return the actors of a node, those that others need first; router and gateway on the router's node.

    Each gets the descriptors that concern it. Incarnations are 0 here; each start gives a new one.
    """
    config = run.config
    roles = node.engines(config.cluster.mode)
    engines: list[tuple[str, Role]] = [
        (f"{node.name}/{role}-{i}", role) for role, count in roles.items() for i in range(count)
    ]
    threads = node.threads or max(1, (os.cpu_count() or 1) // max(1, len(engines)))

    cores = assign_cores(engines, threads, sorted(os.sched_getaffinity(0)))

    def spec(name: str, role: Role, slot: int, own: Descriptors) -> ActorSpec:
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
            fds=own,
            num_engines=len(engines),
            threads=threads,
            cores=cores.engines.get(name, cores.others),
            ready_file=run.ready_file,
        )

    actors = []
    if node.name == config.router.node:
        actors.append(spec("router", "router", -1, Descriptors(control=fds.control)))
        actors.append(spec("gateway", "gateway", -1, Descriptors(tcp=fds.tcp, zmq=fds.zmq, http=fds.http)))
    actors.append(spec(f"{node.name}/migrator", "migrator", -1, Descriptors(arena=fds.arena)))
    actors += [spec(name, role, slot, Descriptors(arena=fds.arena)) for slot, (name, role) in enumerate(engines)]
    return actors

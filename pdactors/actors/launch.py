"""Start this machine's share of a cluster and stay until it ends."""

from __future__ import annotations

import asyncio
import errno
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import msgspec

from pdactors.actors import blueprint
from pdactors.actors.blueprint import ArenaPlan, Run
from pdactors.actors.discovery import Ready
from pdactors.actors.process import Nursery
from pdactors.actors.ready_file import kept_ready_file
from pdactors.actors.remains import sweep
from pdactors.actors.share import Share
from pdactors.actors.spec import ActorSpec, Descriptors, ModelSpec
from pdactors.actors.supervisor import Supervisor
from pdactors.config.address import Address, local_ip, parse_address
from pdactors.config.cluster import ClusterConfig, NodeSection
from pdactors.config.keys import client_key, cluster_keys, folder_of
from pdactors.config.logging import get_logger
from pdactors.config.memory import available_bytes
from pdactors.engine.shape import ModelShape, model_fingerprint
from pdactors.errors import ConfigError
from pdactors.kv.arena import Arena
from pdactors.transport import actors_transport, mooncake

_ADVICE = {
    errno.EADDRINUSE: "it is in use, perhaps by another cluster; end that, or choose another port (0: a free one)",
    errno.EACCES: "this user may not; choose a port above 1023",
    errno.EADDRNOTAVAIL: "it is no address of this machine",
}
KEEPALIVE = {socket.TCP_KEEPIDLE: 30, socket.TCP_KEEPINTVL: 10, socket.TCP_KEEPCNT: 3}  # seconds; peers that vanished


def launch(
    config: ClusterConfig,
    folder: Path,
    *,
    node: str | None = None,
    run_id: str = "",
    control: socket.socket | None = None,
    ready_file: Path | None = None,
    on_ready: Callable[[Ready], None] = lambda _ready: None,
    lifeline: int | None = None,
) -> None:
    """Run this machine's share of the cluster that `config` describes until SIGTERM, Ctrl-C, or the end of the run.

    The share is the node called `node`, or all nodes whose host is this machine; the model is in `folder`. With
    `lifeline`, a descriptor, it also ends when its other end is closed. Where the router is here it begins a run, or
    goes on with `run_id`, and listens on `control`, if whoever calls has bound that already. Outside the main thread
    it hears no signals.

    Raises:
        ConfigError: the file asks for what this version or machine does not have, or an address cannot be bound.
        ConnectionLost: the router, which runs elsewhere, does not answer, or not any more.
        Refused: the router does not take this share; says what differs.
        PDError: an actor failed while the cluster started; its log line says why.
    """
    blueprint.check_available(config)
    config.security.client_token()  # it can be read
    if config.mooncake:
        mooncake.check_available(config.mooncake)
    hosts = {node.name: ip for node in config.node if (ip := local_ip(node.host)) is not None}
    nodes = blueprint.nodes_here(config, hosts, node)
    shape = ModelShape.read(folder)
    blueprint.check_model(config, shape)
    blueprint.check_memory(config, nodes, shape, available_bytes())
    sweep()
    with ExitStack() as opened:
        arenas = {node.name: blueprint.plan_arena(config, node, shape) for node in nodes}
        sockets = _open_sockets(config, nodes, control, opened)
        run = _plan_run(config, folder, shape, arenas[nodes[0].name], hosts, sockets.get("control"), len(nodes))
        if run_id and "control" in sockets:
            run = replace(run, run_id=run_id)
        plans = []
        for here in nodes:
            arena = opened.enter_context(_create(arenas[here.name]))
            own = sockets if here.name == config.router.node else {}
            fds = Descriptors(arena.fileno(), **{name: listening.fileno() for name, listening in own.items()})
            plans.append(blueprint.plan_actors(run, here, fds))
            _log_start(run, here, arenas[here.name])
        if ready_file is not None:
            _have_removed(ready_file, plans[0])

        def tell_ready(ready: Ready) -> None:
            if ready_file is not None:
                opened.enter_context(kept_ready_file(ready_file, ready))
            on_ready(ready)

        addresses = _client_addresses(sockets) if sockets else blueprint.client_addresses(config)
        addresses["key"] = client_key(config.security)
        asyncio.run(_live(lambda: _make_share(run, plans, addresses, tell_ready), lifeline))


def _open_sockets(
    config: ClusterConfig, nodes: Sequence[NodeSection], control: socket.socket | None, opened: ExitStack
) -> dict[str, socket.socket]:
    """Open what router and gateway listen on, by its name in `Descriptors`; nothing where they run elsewhere."""
    if config.router.node not in {node.name for node in nodes}:
        return {}
    sockets = {"control": control or opened.enter_context(bound("router.control", config.router.control))}
    for name, text in (("tcp", config.listen.tcp), ("zmq", config.listen.zmq), ("http", config.listen.http)):
        if text:
            sockets[name] = opened.enter_context(bound(f"listen.{name}", text))
    return sockets


def _plan_run(
    config: ClusterConfig,
    folder: Path,
    shape: ModelShape,
    arena: ArenaPlan,
    hosts: Mapping[str, str],
    control: socket.socket | None,
    num_nodes: int,
) -> Run:
    """Begin a run where the router is, or get ready to learn which run it is that this share joins."""
    secret = config.security.actor_token()
    if not secret and num_nodes == len(config.node):  # nobody else is to know it
        secret = secrets.token_hex(16)
    return Run(
        run_id=secrets.token_hex(4) if control else "",
        config=config,
        model=ModelSpec(
            name=config.model.path,
            folder=str(folder),
            fingerprint=model_fingerprint(folder),
            eos_ids=shape.eos_ids,
            vocab_size=shape.vocab_size,
            max_model_len=config.model.max_model_len,
        ),
        layout=arena.layout,
        control=f"tcp://{_address(control) if control else blueprint.control_address(config)}",
        join_token=secret,
        supervisor_pid=os.getpid(),
        hosts=hosts,
        keys=cluster_keys(folder_of(config.security.key_dir)) if config.security.curve else None,
    )


def _client_addresses(sockets: Mapping[str, socket.socket]) -> dict[str, str]:
    return {
        "tcp": str(_address(sockets["tcp"])) if "tcp" in sockets else "",
        "zmq": f"tcp://{_address(sockets['zmq'])}" if "zmq" in sockets else "",
        "http": str(_address(sockets["http"])) if "http" in sockets else "",
    }


def _have_removed(ready_file: Path, actors: list[ActorSpec]) -> None:
    """Choose who removes the ready file if we are killed: the gateway, or the first actor where there is none."""
    index = next((i for i, actor in enumerate(actors) if actor.role == "gateway"), 0)
    actors[index] = msgspec.structs.replace(actors[index], ready_file=str(ready_file.absolute()))


def _make_share(
    run: Run, plans: Sequence[Sequence[ActorSpec]], addresses: dict[str, str], tell_ready: Callable[[Ready], None]
) -> Share:
    fds = {fd for actors in plans for actor in actors for fd in msgspec.structs.astuple(actor.fds) if fd >= 0}
    nursery = Nursery(run.model.folder, run.config.model.dtype, run.layout.block_tokens, sorted(fds))
    supervisors = [
        Supervisor(_supervisor_spec(actors[0]), actors_transport(run.control, run.keys), actors, nursery)
        for actors in plans
    ]
    return Share(supervisors, nursery, addresses, tell_ready)


def _supervisor_spec(some_actor: ActorSpec) -> ActorSpec:
    return msgspec.structs.replace(
        some_actor,
        name=f"{some_actor.node}/supervisor",
        role="supervisor",
        slot=-1,
        incarnation=time.time_ns() // 1000,
        fds=Descriptors(),
        ready_file="",
    )


def _create(plan: ArenaPlan) -> Arena:
    return Arena.create(
        plan.layout,
        plan.num_blocks,
        extent_blocks=plan.extent_blocks,
        num_slots=plan.num_slots,
        leases_per_slot=plan.leases_per_slot,
        max_lease_blocks=plan.max_lease_blocks,
    )


def _log_start(run: Run, node: NodeSection, plan: ArenaPlan) -> None:
    get_logger(run_id=run.run_id, node=node.name).info(
        "starting",
        mode=run.config.cluster.mode,
        model=run.config.model.path,
        dtype=run.config.model.dtype,
        kv_blocks=plan.num_blocks,
        kv_tokens=plan.num_blocks * plan.layout.block_tokens,
    )


async def _live(make: Callable[[], Share], lifeline: int | None) -> None:
    """Make the share now that there is a loop, and run it until it is told to stop."""
    share = make()
    with told_to_stop(share.stop, lifeline):
        await share.run()


@contextmanager
def told_to_stop(stop: Callable[[], None], lifeline: int | None) -> Iterator[None]:
    """Have `stop` called in this loop at SIGTERM and Ctrl-C, and when the other end of `lifeline` is closed."""
    loop = asyncio.get_running_loop()
    if threading.current_thread() is threading.main_thread():  # no other hears signals
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop)
    if lifeline is not None:
        loop.add_reader(lifeline, stop)
    try:
        yield
    finally:
        if lifeline is not None:
            loop.remove_reader(lifeline)


@contextmanager
def bound(key: str, text: str) -> Iterator[socket.socket]:
    """Listen on the address that a key of the cluster file names; the actor that serves it inherits the socket."""
    address = parse_address(text)
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        listening = socket.create_server((address.host, address.port), family=family, backlog=1024)
    except OSError as error:
        reason = _ADVICE.get(error.errno or 0, error.strerror or str(error))
        raise ConfigError(f'{key} = "{text}": cannot listen there: {reason}') from error
    with listening:
        listening.setblocking(False)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # connections inherit all of these
        for option, value in KEEPALIVE.items():
            listening.setsockopt(socket.IPPROTO_TCP, option, value)
        yield listening


def _address(listening: socket.socket) -> Address:
    return Address(*listening.getsockname()[:2])

"""Start this machine's share of a cluster and stay until it ends."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec

from pdactors.actors import blueprint
from pdactors.actors.blueprint import ArenaPlan, Run
from pdactors.actors.discovery import Ready, remove_ready_file, write_ready_file
from pdactors.actors.spec import ActorSpec, Descriptors, ModelSpec
from pdactors.actors.supervisor import Supervisor
from pdactors.config.address import parse_address
from pdactors.config.cluster import ClusterConfig
from pdactors.config.logging import get_logger
from pdactors.config.memory import available_bytes
from pdactors.engine.shape import ModelShape, model_fingerprint
from pdactors.errors import ConfigError
from pdactors.kv.arena import Arena
from pdactors.transport import transport_for


def launch(
    config: ClusterConfig,
    folder: Path,
    *,
    ready_file: Path | None = None,
    on_ready: Callable[[Ready], None] = lambda _ready: None,
    lifeline: int | None = None,
) -> None:
    """Run the cluster that `config` describes, with the model in `folder`, until SIGTERM or Ctrl-C.

    With `lifeline`, a descriptor, the run also ends when its other end is closed.

    Raises:
        ConfigError: the file asks for what this version or machine does not have, or an address cannot be bound.
        PDError: an actor failed while the cluster started; its log line says why.
    """
    blueprint.check_available(config)
    config.security.client_token()  # it can be read
    shape = ModelShape.read(folder)
    blueprint.check_model(config, shape)
    blueprint.check_memory(config, shape, available_bytes())
    with ExitStack() as opened:
        supervisor = _prepare(config, folder, shape, ready_file, on_ready, opened)
        asyncio.run(_supervise(supervisor, lifeline))


def _prepare(
    config: ClusterConfig,
    folder: Path,
    shape: ModelShape,
    ready_file: Path | None,
    on_ready: Callable[[Ready], None],
    opened: ExitStack,
) -> Callable[[], Supervisor]:
    """Open the arena and the sockets; return what makes the supervisor once a loop runs."""
    node = config.node_named(config.router.node)
    arena_plan = blueprint.plan_arena(config, node, shape)
    layout = arena_plan.layout
    arena = opened.enter_context(_create(arena_plan))
    control = opened.enter_context(_bound("router.control", config.router.control))
    tcp = opened.enter_context(_bound("listen.tcp", config.listen.tcp)) if config.listen.tcp else None
    zmq = opened.enter_context(_bound("listen.zmq", config.listen.zmq)) if config.listen.zmq else None
    http = opened.enter_context(_bound("listen.http", config.listen.http)) if config.listen.http else None
    run = Run(
        run_id=secrets.token_hex(4),
        config=config,
        model=ModelSpec(
            name=config.model.path,
            folder=str(folder),
            fingerprint=model_fingerprint(folder),
            eos_ids=shape.eos_ids,
            vocab_size=shape.vocab_size,
            max_model_len=config.model.max_model_len,
        ),
        layout=layout,
        control=f"tcp://{_address(control)}",
        join_token=config.security.join_token or secrets.token_hex(16),
        supervisor_pid=os.getpid(),
        ready_file=str(ready_file.absolute()) if ready_file else "",
    )
    fds = Descriptors(
        arena=arena.fileno(),
        control=control.fileno(),
        tcp=tcp.fileno() if tcp else -1,
        zmq=zmq.fileno() if zmq else -1,
        http=http.fileno() if http else -1,
    )
    addresses = {
        "tcp": _address(tcp) if tcp else "",
        "zmq": f"tcp://{_address(zmq)}" if zmq else "",
        "http": _address(http) if http else "",
    }
    if ready_file is not None:
        opened.callback(remove_ready_file, ready_file, run.run_id)

    def tell_ready(ready: Ready) -> None:
        if ready_file is not None:
            write_ready_file(ready_file, ready)
        on_ready(ready)

    log = get_logger(run_id=run.run_id)
    log.info(
        "starting",
        mode=config.cluster.mode,
        model=config.model.path,
        dtype=config.model.dtype,
        kv_blocks=arena_plan.num_blocks,
        kv_tokens=arena_plan.num_blocks * layout.block_tokens,
    )
    actors = blueprint.plan_actors(run, node, fds)
    me = _supervisor_spec(actors[0], node.name)
    return lambda: Supervisor(me, transport_for(run.control), actors, tell_ready, addresses=addresses)


def _create(plan: ArenaPlan) -> Arena:
    return Arena.create(
        plan.layout,
        plan.num_blocks,
        extent_blocks=plan.extent_blocks,
        num_slots=plan.num_slots,
        leases_per_slot=plan.leases_per_slot,
        max_lease_blocks=plan.max_lease_blocks,
    )


def _supervisor_spec(some_actor: ActorSpec, node: str) -> ActorSpec:
    return msgspec.structs.replace(
        some_actor, name=f"{node}/supervisor", role="supervisor", slot=-1, incarnation=os.getpid(), fds=Descriptors()
    )


async def _supervise(make: Callable[[], Supervisor], lifeline: int | None) -> None:
    supervisor = make()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, supervisor.stop)
    if lifeline is not None:
        loop.add_reader(lifeline, supervisor.stop)
    try:
        await supervisor.run()
    finally:
        if lifeline is not None:
            loop.remove_reader(lifeline)


@contextmanager
def _bound(key: str, text: str) -> Iterator[socket.socket]:
    """Listen on the address that a key of the cluster file names; the actor that serves it inherits the socket."""
    address = parse_address(text)
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        listening = socket.create_server((address.host, address.port), family=family, backlog=1024)
    except OSError as error:
        raise ConfigError(f'{key} = "{text}": cannot listen there: {error.strerror or error}') from error
    with listening:
        listening.setblocking(False)
        yield listening


def _address(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

"""How many tokens a second one gateway process hands out: a real gateway and router, and an engine that only talks."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from pathlib import Path
from typing import Self

import msgspec
import psutil
from msgspec import Struct

from pdactors.actors.actor import GATEWAY, Actor
from pdactors.actors.process import spawn_actor
from pdactors.actors.router import Router
from pdactors.actors.spec import ActorSpec, Descriptors, ModelSpec
from pdactors.config.cluster import ClusterConfig, ClusterSection, NodeSection, RouterSection
from pdactors.engine import store
from pdactors.engine.manifest import Progress, silent
from pdactors.engine.shape import ModelShape
from pdactors.errors import PDError
from pdactors.kv.layout import KVLayout
from pdactors.messages import Finished, FinishReason, Load, Member, Prefill, Release, Role, Token, Tokens
from pdactors.text.tokenizer import Tokenizer
from pdactors.transport import Transport, actors_transport

STREAMS = 200
TOKENS = 500  # of each
PROMPT = tuple(range(10, 26))
WINDOW = 8  # steps that the engine may be ahead of the clients
LOOK_S = 0.005
READ_BYTES = 1 << 18
PATIENCE_S = 120.0
STALL_S = 20.0  # without a token
TEXT = "The quick brown fox jumps over the lazy dog, and naïve readers of 日本語 pay 3.50 € for it.\n"


class Fanout(Struct, frozen=True):
    """Streams of one connection each, and what one gateway process gave to all of them together."""

    streams: int
    tokens_s: float
    cpu_us: float  # of the gateway, a token


class _Talker(Actor):
    """A worker that computes nothing: it takes prompts, and says tokens when it is told to."""

    role = "worker"

    def __init__(self, spec: ActorSpec, transport: Transport, token_ids: Sequence[int]) -> None:
        super().__init__(spec, transport)
        self.asked: list[str] = []
        self._token_ids = token_ids
        self.accept(Prefill, self._on_prefill, "router")
        self.accept(Release, lambda *_: None, "router", "gateway")

    @property
    def is_heard(self) -> bool:
        """Whether the gateway took this worker in."""
        return GATEWAY in self._hosts

    def wants(self, member: Member) -> bool:
        return member.role == "gateway"

    def load(self) -> Load:
        return Load(max_sequences=1 << 16, max_blocks=1 << 30)

    def _on_prefill(self, _sender: Member, message: Prefill) -> None:
        self.asked.append(message.request)

    def step(self, index: int, finish: FinishReason | None) -> None:
        """Say the next token of every request, in one message."""
        token_id = self._token_ids[index % len(self._token_ids)]
        tokens = tuple(Token(request, 1, index, token_id, finish) for request in self.asked)
        if not self.tell(GATEWAY, Tokens(tokens)):
            raise PDError("the gateway cannot be reached")
        if finish:
            for request in self.asked:
                self.tell("router", Finished(request, 1, index + 1))


def measure_fanout(
    model: str = "smollm2-135m", *, streams: int = STREAMS, tokens: int = TOKENS, progress: Progress = silent
) -> Fanout:
    """Start a gateway in a process of its own, and have an engine's messages go through it to TCP clients here.

    Raises:
        PDError: the gateway does not start, a stream breaks, or ends with other than its tokens.
    """
    folder = store.resolve(model, fetch=True, progress=progress)
    progress("fan-out", 0, 0)
    try:
        return asyncio.run(_measure(str(folder), streams, tokens))
    except ExceptionGroup as errors:  # of the tasks that the actors here live in
        raise errors.exceptions[0] from None


async def _measure(folder: str, streams: int, tokens: int) -> Fanout:
    async with AsyncExitStack() as stack:
        gateway, talker, address = await stack.enter_async_context(_cluster(folder, streams, tokens))
        clients = stack.enter_context(_Clients(address, streams))
        clients.ask(tokens)
        await _until(lambda: len(talker.asked) == streams, "the requests did not arrive")
        before, began = _cpu_s(gateway), time.perf_counter()
        sent = 0
        heard = began
        while clients.num_ended < streams:
            while sent < tokens and (sent - WINDOW) * streams < clients.num_tokens:
                talker.step(sent, "length" if sent == tokens - 1 else None)
                sent += 1
            await asyncio.sleep(LOOK_S)
            if clients.read():
                heard = time.perf_counter()
            elif time.perf_counter() > heard + STALL_S:
                raise PDError(f"{clients.num_tokens} of {streams * tokens} tokens came, and then none")
        seconds, cpu_s = time.perf_counter() - began, _cpu_s(gateway) - before
    if clients.num_tokens != streams * tokens:
        raise PDError(f"{clients.num_tokens} tokens came, {streams * tokens} were sent")
    return Fanout(streams, round(streams * tokens / seconds), round(cpu_s / (streams * tokens) * 1e6, 2))


@asynccontextmanager
async def _cluster(folder: str, streams: int, tokens: int) -> AsyncIterator[tuple[int, _Talker, tuple[str, int]]]:
    """Run a router and the talking worker here, and a gateway beside; yields its pid, the worker, the address."""
    with ExitStack() as sockets:
        control, clients = (sockets.enter_context(socket.create_server(("127.0.0.1", 0), backlog=1024)) for _ in "cc")
        specs = _specs(folder, control, clients, tokens)
        router = Router(specs["router"], actors_transport(specs["router"].control))
        tokenizer = Tokenizer(Path(folder))
        talker = _Talker(specs["worker"], actors_transport(specs["worker"].control), tokenizer.encode(TEXT))
        async with asyncio.TaskGroup() as tasks:
            for actor in (router, talker):
                tasks.create_task(actor.run())
            level = os.environ.get("PDACTORS_LOG_LEVEL", "warning")
            gateway = spawn_actor(specs["gateway"], {"PDACTORS_LOG_LEVEL": level})
            try:
                ready = {"gateway": "ready", "worker": "ready"}
                await _until(
                    lambda: talker.is_heard and {m.role: m.state for m in router.members.values()} == ready,
                    "the gateway did not start",
                )
                yield gateway.pid, talker, clients.getsockname()
            finally:
                gateway.send(signal.SIGKILL)
                await gateway.ended()
                gateway.reason()  # closes its pipe
                router.stop()
                talker.stop()


def _specs(folder: str, control: socket.socket, clients: socket.socket, tokens: int) -> dict[str, ActorSpec]:
    shape = ModelShape.read(Path(folder))
    made: dict[str, ActorSpec] = {}
    roles: tuple[Role, ...] = "router", "gateway", "worker"
    for role in roles:
        made[role] = ActorSpec(
            run_id=secrets.token_hex(4) if not made else made["router"].run_id,
            name=role,
            role=role,
            node="n0",
            rack="r0",
            slot=-1,
            incarnation=1,
            supervisor_pid=os.getpid(),
            config=ClusterConfig(
                cluster=ClusterSection(mode="chunked"),
                router=RouterSection(max_queue=1 << 16),
                node=(NodeSection("n0"),),
            ),
            model=ModelSpec("fan-out", folder, "00" * 8, (), shape.vocab_size, len(PROMPT) + tokens),
            layout=KVLayout(1, 1, 32, 32, "float32"),
            control="tcp://{}:{}".format(*control.getsockname()),
            join_token=made["router"].join_token if made else secrets.token_hex(16),
            fds=_FDS[role](control.fileno(), clients.fileno()),
        )
    return made


_FDS: dict[str, Callable[[int, int], Descriptors]] = {
    "router": lambda control, _: Descriptors(control=control),
    "gateway": lambda _, clients: Descriptors(tcp=clients),
    "worker": lambda *_: Descriptors(),
}


class _Clients:
    """Connections with a stream each, read now and then, so that reading takes little of the machine."""

    def __init__(self, address: tuple[str, int], count: int) -> None:
        self.num_tokens = self.num_ended = 0
        self._sockets = [socket.create_connection(address) for _ in range(count)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        for connection in self._sockets:
            connection.close()

    def ask(self, tokens: int) -> None:
        """Ask for a stream on each."""
        ask = {"id": 1, "prompt_token_ids": PROMPT, "max_tokens": tokens, "ignore_eos": True}
        for connection in self._sockets:
            connection.sendall(msgspec.json.encode(ask) + b"\n")
            connection.setblocking(False)

    def read(self) -> bool:
        """Count what has come; say whether anything has."""
        is_news = False
        for connection in self._sockets:
            try:
                data = connection.recv(READ_BYTES)
            except BlockingIOError:
                continue
            if not data:
                raise PDError("the gateway closed a connection")
            is_news = True
            num_ended = data.count(b'"event":"done"')
            self.num_ended += num_ended
            self.num_tokens += data.count(b"\n") - num_ended
        return is_news


def _cpu_s(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


async def _until(condition: Callable[[], bool], otherwise: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline:
            raise PDError(otherwise)
        await asyncio.sleep(LOOK_S)

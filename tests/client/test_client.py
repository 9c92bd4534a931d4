"""The client library against a real cluster, and what strangers send to its socket."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import psutil
import pytest

import pdactors
from pdactors import AsyncClient, BadRequest, Client, Cluster, ConnectionLost, PromptTooLong, RequestTimeout
from pdactors.actors import client_server
from pdactors.client_messages import (
    ClientEvents,
    ClientHello,
    ClientPing,
    ClientPong,
    ClientRequest,
    ClientWelcome,
    ErrorEvent,
    RequestBody,
    to_client_decoder,
)
from pdactors.messages import (
    PROTOCOL_VERSION,
    Cancel,
    Drain,
    Exited,
    Generate,
    Heartbeat,
    Hello,
    KVHandle,
    Lease,
    Member,
    Message,
    Prefilled,
    Refusal,
    Release,
    Sampling,
    Segment,
    Stranger,
    Token,
    Tokens,
    control_decoder,
    decode,
    encode,
)
from pdactors.transport import Channel, Transport, actors_transport, transport_for

ALWAYS: dict[str, Any] = {"max_tokens": 1500, "ignore_eos": True}  # an answer that takes seconds


@pytest.fixture
def client(cluster: Cluster) -> Iterator[Client]:
    with Client(cluster.zmq) as client:
        yield client


@pytest.fixture
def busy(client: Client) -> Callable[[], int]:
    """Say how many requests the cluster has."""
    return lambda: int(client.status()["requests"])


# ---- Client --------


def test_stream_events_and_generate_give_the_same_answer(client: Client) -> None:
    answer = client.generate("the cat sat", max_tokens=12)
    assert len(answer.token_ids) == answer.usage.completion_tokens == 12
    assert (answer.finish_reason, answer.path) == ("length", "lease")
    assert answer.timing.total_ms >= answer.timing.ttft_ms > 0
    tokens = list(client.stream("the cat sat", max_tokens=12))
    assert "".join(token.text for token in tokens) == answer.text
    assert tuple(token.token_id for token in tokens) == answer.token_ids
    events = list(client.events("the cat sat", max_tokens=12))
    assert [(event.index, event.text) for event in events[:-1]] == [(token.index, token.text) for token in tokens]  # type: ignore[union-attr]
    assert events[-1].finish_reason == "length"  # type: ignore[union-attr]


def test_messages_go_through_the_chat_template_and_a_prompt_does_not(client: Client) -> None:
    plain = client.generate("<|im_start|>user: hi<|im_end|><|im_start|>assistant:", max_tokens=6)
    chat = client.generate(messages=[{"role": "user", "content": "hi"}], max_tokens=6)
    assert chat.token_ids == plain.token_ids
    assert chat.token_ids != client.generate("hi", max_tokens=6).token_ids


def test_token_ids_are_a_prompt_too(client: Client) -> None:
    answer = client.generate(prompt_token_ids=[5, 6, 7], max_tokens=1)
    assert answer.usage.prompt_tokens == 3


def test_leaving_a_stream_cancels_it(client: Client, busy: Callable[[], int], wait: Callable[..., None]) -> None:
    for token in client.stream("^", **ALWAYS):
        if token.index == 2:
            assert busy() == 1
            break
    wait(lambda: busy() == 0, 1.0, "the request goes on")


def test_closing_a_stream_that_is_kept_cancels_it(
    client: Client, busy: Callable[[], int], wait: Callable[..., None]
) -> None:
    stream = client.stream("^", **ALWAYS)
    next(stream)
    assert busy() == 1
    stream.close()  # type: ignore[attr-defined]
    wait(lambda: busy() == 0, 1.0, "the request goes on")


def test_a_stream_that_is_collected_on_the_clients_own_thread_is_cancelled(
    client: Client, busy: Callable[[], int], wait: Callable[..., None]
) -> None:
    kept = [client.stream("^", **ALWAYS)]
    next(kept[0])
    assert busy() == 1
    client._loop.call_soon_threadsafe(kept.clear)
    wait(lambda: busy() == 0, 1.0, "the request goes on")


@pytest.mark.parametrize("delay_ms", range(8))
def test_closing_at_any_moment_leaves_no_thread_waiting(cluster: Cluster, delay_ms: int) -> None:
    client = Client(cluster.zmq)
    ended = threading.Event()

    def follow() -> None:
        with contextlib.suppress(ConnectionLost):
            for _ in client.stream("^", **ALWAYS):
                pass
        ended.set()

    threading.Thread(target=follow, daemon=True).start()
    time.sleep(0.02 + delay_ms / 1000)
    client.close()
    assert ended.wait(5.0)


def test_closing_the_client_cancels_and_wakes_who_waits(
    cluster: Cluster, busy: Callable[[], int], wait: Callable[..., None]
) -> None:
    other = Client(cluster.zmq)
    stream = other.stream("^", **ALWAYS)
    next(stream)
    failed: list[BaseException] = []

    def follow() -> None:
        try:
            for _ in other.stream("^", **ALWAYS):
                pass
        except ConnectionLost as error:
            failed.append(error)

    follower = threading.Thread(target=follow)
    follower.start()
    wait(lambda: busy() == 2, 5.0, "the requests do not run")
    other.close()
    other.close()
    follower.join(5.0)
    assert len(failed) == 1
    with pytest.raises(ConnectionLost):
        list(stream)
    with pytest.raises(ConnectionLost, match="closed"):
        other.generate("x")
    with pytest.raises(ConnectionLost, match="closed"):
        next(other.stream("x"))
    wait(lambda: busy() == 0, 1.0, "the requests go on")


@pytest.mark.parametrize(
    ("options", "kind", "part"),
    [
        ({"prompt": "x", "max_tokens": 0}, BadRequest, "max_tokens"),
        ({"prompt": "x", "tempreature": 1}, BadRequest, "tempreature"),
        ({"prompt": "x", "min_tokens": 9, "max_tokens": 3}, BadRequest, "min_tokens"),
        ({"prompt": ""}, BadRequest, "prompt: is empty"),
        ({}, BadRequest, "exactly one"),
        ({"prompt": "x", "messages": []}, BadRequest, "exactly one"),
        ({"messages": [{"role": "boss", "content": "x"}]}, BadRequest, "messages[0].role"),
        ({"messages": [{"role": "user", "content": object()}]}, BadRequest, "cannot be encoded"),
        ({"prompt": "half a character \ud800"}, BadRequest, "cannot be encoded"),
        ({"prompt_token_ids": [2**31]}, BadRequest, "prompt_token_ids[0]"),
        ({"prompt_token_ids": [2**31 - 1]}, BadRequest, "outside the vocabulary"),
        ({"prompt_token_ids": [5] * 2048}, PromptTooLong, "model.max_model_len"),
        ({"prompt": "^", "deadline_ms": 100, **ALWAYS}, RequestTimeout, "time ran out"),
    ],
)
def test_errors_are_of_the_class_that_their_code_names(
    client: Client, options: dict[str, Any], kind: type[Exception], part: str
) -> None:
    with pytest.raises(kind) as caught:
        client.generate(**options)
    assert part in str(caught.value)
    assert type(caught.value) is kind
    assert client.generate("x", max_tokens=1).finish_reason == "length"


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:1", "tcp://192.0.2.1:7071"])
def test_an_address_where_nobody_answers_is_lost_within_the_time_limit(address: str) -> None:
    began = time.monotonic()
    with pytest.raises(ConnectionLost, match="nobody answers at"):
        Client(address, connect_timeout_s=0.3)
    assert time.monotonic() - began < 3.0


@pytest.mark.parametrize("address", ["nonsense", "tcp://", "tcp://127.0.0.1", "tcp://127.0.0.1:99999", "udp://x:1"])
def test_an_address_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(pdactors.PDError):
        Client(address, connect_timeout_s=0.3)


def test_a_socket_that_does_not_speak_zeromq_is_lost_within_the_time_limit(cluster: Cluster) -> None:
    with pytest.raises(ConnectionLost, match="nobody answers at"):
        Client(f"tcp://{cluster.tcp}", connect_timeout_s=0.5)


def test_threads_may_use_one_client(client: Client) -> None:
    expected = {number: client.generate(f"text {number}", max_tokens=15).token_ids for number in range(8)}
    found: dict[int, list[tuple[int, ...]]] = {number: [] for number in expected}

    def talk(number: int) -> None:
        for _ in range(4):
            found[number].append(tuple(token.token_id for token in client.stream(f"text {number}", max_tokens=15)))

    threads = [threading.Thread(target=talk, args=(number,)) for number in expected]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {number: [ids] * 4 for number, ids in expected.items()}


def test_status_describes_every_actor(cluster: Cluster, client: Client) -> None:
    status = client.status()
    assert status["run_id"] == cluster.ready.run_id
    assert {(actor["name"], actor["pid"]) for actor in status["actors"]} == {
        (actor.name, actor.pid) for actor in cluster.ready.actors
    }
    for actor in status["actors"]:
        blocks = actor["kv_blocks"]
        assert blocks["total"] == blocks["free"] + blocks["cached"] + blocks["used"] + blocks["leased_out"]
        assert actor["state"] == "ready"
    assert not any(client.leaks().values())


# ---- AsyncClient --------


async def test_the_async_client_streams_and_generates(cluster: Cluster) -> None:
    async with AsyncClient(cluster.zmq) as client:
        answer = await client.generate("the cat sat", max_tokens=12)
        tokens = [token async for token in client.stream("the cat sat", max_tokens=12)]
        assert tuple(token.token_id for token in tokens) == answer.token_ids
        many = await asyncio.gather(*(client.generate("the cat sat", max_tokens=12) for _ in range(8)))
        assert {one.token_ids for one in many} == {answer.token_ids}
        assert (await client.status())["run_id"] == cluster.ready.run_id
        assert not any((await client.leaks()).values())
        with pytest.raises(BadRequest):
            await client.generate("x", max_tokens=-1)


async def test_breaking_out_of_an_async_stream_cancels(cluster: Cluster) -> None:
    async with AsyncClient(cluster.zmq) as client:
        async for token in client.stream("^", **ALWAYS):
            if token.index == 2:
                break
        await until(client, 0)


async def test_cancelling_a_task_cancels_its_request(cluster: Cluster) -> None:
    async with AsyncClient(cluster.zmq) as client:
        task = asyncio.create_task(client.generate("^", **ALWAYS))
        await until(client, 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(client, 0)


async def test_a_closed_async_client_says_so(cluster: Cluster) -> None:
    client = await AsyncClient(cluster.zmq).connect()
    await client.close()
    await client.close()
    with pytest.raises(ConnectionLost):
        await client.generate("x")


async def until(client: AsyncClient, num_requests: int) -> None:
    """Wait until the cluster has so many requests."""
    async with asyncio.timeout(2.0):
        while (await client.status())["requests"] != num_requests:  # noqa: ASYNC110 - there is nothing to be told by
            await asyncio.sleep(0.02)


# ---- Clients that die --------

STREAMING = """
import sys
from pdactors import Client
client = Client(sys.argv[1])
stream = client.stream("^", max_tokens=1500, ignore_eos=True)
next(stream)
print("streaming", flush=True)
if sys.argv[2] == "wait":
    sys.stdin.read()
"""


@contextmanager
def program(cluster: Cluster, how: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program that streams an endless answer, up to its first token."""
    command = [sys.executable, "-c", STREAMING, cluster.zmq, how]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"streaming\n"
        yield process
        process.kill()


def test_a_killed_client_has_its_requests_cancelled(
    cluster: Cluster, busy: Callable[[], int], wait: Callable[..., None]
) -> None:
    with program(cluster, "wait") as process:
        assert busy() == 1
        process.kill()
        wait(lambda: busy() == 0, 1.0, "the dead client's request goes on")


def test_a_program_that_ends_amid_a_stream_ends_at_once_and_without_a_word(
    cluster: Cluster, busy: Callable[[], int], wait: Callable[..., None]
) -> None:
    with program(cluster, "leave") as process:
        assert process.wait(5.0) == 0
        assert process.stderr is not None
        assert process.stderr.read() == b""
        wait(lambda: busy() == 0, 1.0, "its request goes on")


# ---- Strangers at the client socket --------


class Stranger_:
    """A peer that sends what it likes and keeps what it gets."""

    def __init__(self, channel: Channel, inbox: asyncio.Queue[list[bytes]]) -> None:
        self.channel = channel
        self.inbox = inbox

    def send(self, *frames: bytes) -> None:
        self.channel.send(frames)

    def tell(self, message: Message) -> None:
        self.send(*encode(message))

    async def get(self, decoder: Any) -> Any:
        async with asyncio.timeout(5.0):
            return decode(decoder, await self.inbox.get())


@asynccontextmanager
async def stranger(
    address: str, identity: bytes = b"", make: Callable[[str], Transport] = transport_for
) -> AsyncIterator[Stranger_]:
    transport = make(address)
    inbox: asyncio.Queue[list[bytes]] = asyncio.Queue()
    channel = transport.connect(
        address, identity or secrets.token_bytes(8), lambda _peer, frames: inbox.put_nowait(frames)
    )
    try:
        yield Stranger_(channel, inbox)
    finally:
        transport.close()


HANDLE = KVHandle("n0", "n0/prefill-0", "0" * 16, (Segment("n0/prefill-0", Lease(0, 1), 0, (0, 1)),), 40)
FOREIGN: list[Message] = [
    Heartbeat("ready"),
    Generate("r", (1, 2), Sampling()),
    Cancel("r"),
    Prefilled("r", 1, 5, HANDLE, 0.0),
    Release("r", 1),
    Exited("n0/decode-0", 1),
    Drain(),
    Tokens((Token("r", 1, 0, 5),)),
]
GARBAGE = [b"", b"\0", b"x" * 1000, b"\xff" * 100, b"\x91" * 100_000, b"\xdd\xff\xff\xff\xff", os.urandom(5000)]


async def test_foreign_messages_at_the_client_socket_are_refused(cluster: Cluster) -> None:
    async with stranger(cluster.zmq) as peer:
        peer.tell(ClientHello(PROTOCOL_VERSION))
        assert isinstance(await peer.get(to_client_decoder), ClientWelcome)
        for message in FOREIGN:
            peer.tell(message)
            assert error_in(await peer.get(to_client_decoder)).code == "bad_request"
        peer.tell(ClientRequest(RequestBody(id=1, prompt="x", max_tokens=1)))
        assert isinstance(await peer.get(to_client_decoder), ClientEvents)


async def test_garbage_at_the_client_socket_is_refused(cluster: Cluster) -> None:
    async with stranger(cluster.zmq) as peer:
        peer.tell(ClientHello(PROTOCOL_VERSION))
        assert isinstance(await peer.get(to_client_decoder), ClientWelcome)
        for frame in GARBAGE:
            peer.send(frame)
            assert error_in(await peer.get(to_client_decoder)).code == "bad_request"
        for frames in ([b"a", b"b"], encode(ClientPing()) * 2, [b""] * 16):
            peer.send(*frames)
            assert "frame" in error_in(await peer.get(to_client_decoder)).message


async def test_nothing_is_done_for_a_client_that_did_not_say_hello(cluster: Cluster) -> None:
    async with stranger(cluster.zmq) as peer:
        peer.tell(ClientRequest(RequestBody(id=1, prompt="^", max_tokens=500)))
        assert error_in(await peer.get(to_client_decoder)).code == "unauthorized"
        peer.tell(ClientHello(PROTOCOL_VERSION + 1))
        assert "protocol" in error_in(await peer.get(to_client_decoder)).message


async def test_a_huge_frame_is_not_read_and_harms_nobody(cluster: Cluster) -> None:
    async with stranger(cluster.zmq) as peer, AsyncClient(cluster.zmq) as client:
        peer.tell(ClientHello(PROTOCOL_VERSION))
        assert isinstance(await peer.get(to_client_decoder), ClientWelcome)
        peer.send(b"x" * client_server.MAX_MESSAGE_BYTES)
        assert error_in(await peer.get(to_client_decoder)).code == "bad_request"
        peer.send(b"x" * (client_server.MAX_MESSAGE_BYTES + 1))
        async with asyncio.timeout(10.0):
            while peer.inbox.empty():  # the first pings may go down with the old connection
                peer.tell(ClientPing())
                await asyncio.sleep(0.2)
        assert isinstance(await peer.get(to_client_decoder), ClientPong)
        assert (await client.generate("the cat", max_tokens=3)).finish_reason == "length"


async def test_two_peers_of_one_name_do_not_hear_each_other(cluster: Cluster) -> None:
    async with stranger(cluster.zmq, b"twin") as one:
        one.tell(ClientHello(PROTOCOL_VERSION))
        assert isinstance(await one.get(to_client_decoder), ClientWelcome)
        async with stranger(cluster.zmq, b"twin") as other:
            other.tell(ClientRequest(RequestBody(id=1, prompt="x", max_tokens=1)))
            one.tell(ClientRequest(RequestBody(id=2, prompt="x", max_tokens=1)))
            event = (await one.get(to_client_decoder)).events[0]
            assert event.id == 2
            assert other.inbox.empty()


def error_in(message: ClientEvents) -> ErrorEvent:
    (event,) = message.events
    assert isinstance(event, ErrorEvent)
    return event


# ---- Strangers at the router --------


@pytest.fixture
def control(cluster: Cluster) -> str:
    """The router's address, which no file names."""
    (router,) = [actor.pid for actor in cluster.ready.actors if actor.role == "router"]
    (port,) = {c.laddr.port for c in psutil.Process(router).net_connections("tcp") if c.status == psutil.CONN_LISTEN}
    return f"tcp://127.0.0.1:{port}"


async def test_strangers_at_the_router_are_told_so_and_change_nothing(cluster: Cluster, control: str) -> None:
    async with stranger(control, make=actors_transport) as peer, AsyncClient(cluster.zmq) as client:
        for frame in GARBAGE:
            peer.send(frame)
        peer.send(b"a", b"b")
        for message in FOREIGN:
            peer.tell(message)
        peer.tell(ClientHello(PROTOCOL_VERSION))
        for _ in range(len(GARBAGE) + 1 + len(FOREIGN) + 1):
            assert isinstance(await peer.get(control_decoder), Stranger)
        assert (await client.generate("the cat", max_tokens=3)).finish_reason == "length"


@pytest.mark.parametrize("token", ["", "wrong", "ü", "x" * 100_000])
async def test_an_actor_without_the_join_token_is_refused_without_a_hint(control: str, token: str) -> None:
    member = Member("n0/decode-0", "decode", "n0", "r0", 1, 2**60)
    async with stranger(control, b"n0/decode-0#1152921504606846976", actors_transport) as peer:
        peer.tell(Hello(PROTOCOL_VERSION, pdactors.__version__, member, "", "", token, "chunked", 1))
        refusal = await peer.get(control_decoder)
        assert isinstance(refusal, Refusal)
        assert refusal.reason == "join token: wrong or missing"


async def test_the_name_of_an_actor_cannot_be_taken(cluster: Cluster, control: str) -> None:
    async with AsyncClient(cluster.zmq) as client:
        (decode_actor,) = [a for a in (await client.status())["actors"] if a["role"] == "decode"]
        identity = f"{decode_actor['name']}#{decode_actor['incarnation']}".encode()
        async with stranger(control, identity, actors_transport) as peer:
            peer.tell(Heartbeat("stopping"))
            peer.tell(Release("r", 1))
            assert (await client.generate("the cat", max_tokens=5)).finish_reason == "length"
            assert peer.inbox.empty()

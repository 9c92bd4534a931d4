"""Every data port keeps the same promises."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import numpy as np
import pytest

from pdactors.errors import BadRequest, ConfigError, ConnectionLost, PDError
from pdactors.transport import ucx
from pdactors.transport.data_port import MAX_BUFFERS, TAG_BITS, DataPort
from pdactors.transport.inproc_port import InprocPort
from pdactors.transport.ucx import UcxPort, device_of

PORTS = {"inproc": InprocPort, "ucx": lambda: UcxPort("lo", "")}
LARGE = 8 << 20  # more than sockets swallow at once
NUM_BLOCKS = 128  # of a transfer that takes a while
tags = itertools.count(1)


class Ending:
    """Stands in for `ended`; tells its error, and when it is called twice."""

    def __init__(self) -> None:
        self._done: asyncio.Future[PDError | None] = asyncio.get_running_loop().create_future()

    def __call__(self, error: PDError | None) -> None:
        self._done.set_result(error)

    @property
    def is_here(self) -> bool:
        return self._done.done()

    async def wait(self) -> PDError | None:
        return await asyncio.wait_for(asyncio.shield(self._done), 20)


class Pair:
    """Two ports that are connected, and what their connections told."""

    def __init__(self, make: Callable[[], DataPort]) -> None:
        self.ports = {"a": make(), "b": make()}
        self.lost: asyncio.Queue[tuple[str, PDError]] = asyncio.Queue()
        self.connect()

    def connect(self) -> None:
        for me, peer in ("ab", "ba"):
            self.ports[me].connect(peer, self.ports[peer].address, lambda *what: self.lost.put_nowait(what))

    def send(self, source: str, tag: int, buffers: list[bytes]) -> Ending:
        ending = Ending()
        self.ports[source].send("ab"[source == "a"], tag, buffers, ending)
        return ending

    def receive(self, target: str, tag: int, sizes: list[int]) -> tuple[list[bytearray], Ending]:
        buffers, ending = [bytearray(size) for size in sizes], Ending()
        self.ports[target].receive("ab"[target == "a"], tag, buffers, ending)
        return buffers, ending

    async def move(self, buffers: list[bytes], source: str = "a") -> list[bytearray]:
        tag = next(tags)
        received, arrived = self.receive("ab"[source == "a"], tag, [len(buffer) for buffer in buffers])
        sent = self.send(source, tag, buffers)
        assert (await sent.wait(), await arrived.wait()) == (None, None)
        return received

    async def settle(self) -> None:
        """Let through what is on its way: a transfer in the same direction overtakes nothing."""
        await self.move([b"x"], "a")
        await self.move([b"x"], "b")


@pytest.fixture(params=PORTS)
def make(request: pytest.FixtureRequest) -> Callable[[], DataPort]:
    return PORTS[request.param]


@pytest.fixture
async def pair(make: Callable[[], DataPort]) -> AsyncIterator[Pair]:
    made = Pair(make)
    yield made
    for port in made.ports.values():
        port.close()


def noise(size: int) -> bytes:
    return random.Random(size).randbytes(size)


@pytest.mark.parametrize("size", [1, 7, 4095, 8191, 8192, 65_537, 737_280, LARGE + 1])
async def test_bytes_of_any_size_arrive_as_they_were_sent(pair, size):
    assert await pair.move([noise(size)]) == [noise(size)]


async def test_a_transfer_is_a_row_of_buffers_of_different_sizes(pair):
    buffers = [noise(size) for size in (100, LARGE, 1, 50_000)]
    assert await pair.move(buffers) == buffers
    assert await pair.move(buffers, "b") == buffers


async def test_the_longest_row_arrives(pair):
    buffers = [noise(number + 1) for number in range(MAX_BUFFERS)]
    assert await pair.move(buffers) == buffers


async def test_a_buffer_may_be_any_contiguous_memory(pair):
    source, target = np.arange(300_000, dtype=np.float32).reshape(2, -1), np.zeros((2, 150_000), np.float32)
    arrived, sent = Ending(), Ending()
    pair.ports["b"].receive("a", 1, [target[1]], arrived)
    pair.ports["a"].send("b", 1, [source[1]], sent)
    assert (await sent.wait(), await arrived.wait()) == (None, None)
    assert (target[1] == source[1]).all()
    assert not target[0].any()


async def test_transfers_arrive_by_tag_in_whatever_order_they_are_expected(pair):
    sent = [pair.send("a", 10 + i, [noise(20_000 + i)]) for i in range(20)]
    expected = [pair.receive("b", 10 + i, [20_000 + i]) for i in reversed(range(20))]
    for i, (buffers, arrived) in zip(reversed(range(20)), expected, strict=True):
        assert await arrived.wait() is None
        assert buffers == [noise(20_000 + i)]
    assert [await ending.wait() for ending in sent] == [None] * 20


async def test_many_transfers_run_at_once_in_both_directions(pair):
    rows = [[noise(737_280 - i), noise(100 + i)] for i in range(12)]
    moved = await asyncio.gather(*(pair.move(row, "ab"[i % 2]) for i, row in enumerate(rows)))
    assert moved == rows


async def test_what_is_sent_before_it_is_expected_waits(pair):
    sent = pair.send("a", 5, [noise(300), noise(LARGE)])
    await pair.settle()
    buffers, arrived = pair.receive("b", 5, [300, LARGE])
    assert (await sent.wait(), await arrived.wait()) == (None, None)
    assert buffers == [noise(300), noise(LARGE)]


async def test_the_largest_tag_is_a_tag_like_any_other(pair):
    last = (1 << TAG_BITS) - 1
    buffers, arrived = pair.receive("b", last, [10])
    pair.send("a", last, [noise(10)])
    assert await arrived.wait() is None
    assert buffers == [noise(10)]


@pytest.mark.parametrize("tag", [-1, 1 << TAG_BITS])
async def test_a_tag_out_of_range_is_refused(pair, tag):
    with pytest.raises(ValueError, match="48 bits"):
        pair.send("a", tag, [b"x"])
    with pytest.raises(ValueError, match="48 bits"):
        pair.receive("b", tag, [1])


@pytest.mark.parametrize("count", [0, MAX_BUFFERS + 1])
async def test_too_many_or_no_buffers_are_refused(pair, count):
    with pytest.raises(ValueError, match="1 to 256"):
        pair.send("a", 1, [b"x"] * count)
    with pytest.raises(ValueError, match="1 to 256"):
        pair.receive("b", 1, [1] * count)


async def test_a_read_only_buffer_receives_nothing(pair):
    with pytest.raises(ValueError, match="read-only"):
        pair.ports["b"].receive("a", 1, [b"constant"], Ending())


@pytest.mark.parametrize(("sent", "expected"), [(100, 99), (99, 100), (800_000, 737_280), (737_280, 800_000)])
@pytest.mark.parametrize("early", [False, True])
async def test_another_size_is_an_error_and_writes_nothing(pair, sent, expected, early):
    if early:
        pair.send("a", 3, [b"\xff" * sent])
        await pair.settle()
    (buffer,), arrived = pair.receive("b", 3, [expected])
    if not early:
        pair.send("a", 3, [b"\xff" * sent])
    error = await arrived.wait()
    assert isinstance(error, BadRequest)
    assert str(sent) in error.message
    assert str(expected) in error.message
    await pair.settle()
    assert not any(buffer)


async def test_other_transfers_go_on_after_a_size_was_wrong(pair):
    _, bad = pair.receive("b", 3, [10, LARGE])
    pair.send("a", 3, [noise(11), noise(LARGE)])
    assert isinstance(await bad.wait(), BadRequest)
    assert await pair.move([noise(LARGE)]) == [noise(LARGE)]


async def test_a_peer_that_is_not_connected_is_an_error(pair):
    for port in pair.ports.values():
        with pytest.raises(ConnectionLost, match="x is not connected"):
            port.send("x", 1, [b"x"], Ending())
        with pytest.raises(ConnectionLost, match="x is not connected"):
            port.receive("x", 1, [bytearray(1)], Ending())
        port.disconnect("x")


async def test_connecting_twice_is_an_error(pair):
    with pytest.raises(ConnectionLost, match="b is connected already"):
        pair.ports["a"].connect("b", pair.ports["b"].address, print)


@pytest.mark.parametrize(
    "spoil", [lambda _: b"", lambda _: b"nonsense", lambda good: good[:-1], lambda good: good + b"x"]
)
async def test_an_address_that_makes_no_sense_is_refused(pair, spoil):
    with pytest.raises(ConnectionLost, match="address"):
        pair.ports["a"].connect("c", spoil(pair.ports["b"].address), print)


async def is_begun(buffer: bytearray) -> None:
    """Wait until a transfer of 0xff has written something."""
    while not any(buffer[::4096]):  # noqa: ASYNC110 - memory that is written raises no event
        await asyncio.sleep(0)


def is_cut(buffers: list[bytearray], error: PDError | None) -> bool:
    """Whether a transfer of 0xff broke off; if not, it must have arrived."""
    assert error is None or isinstance(error, ConnectionLost)
    assert error is not None or all(buffer.count(0xFF) == len(buffer) for buffer in buffers)
    return error is not None


@pytest.mark.parametrize("early", [False, True])
async def test_disconnecting_ends_what_is_under_way_and_nothing_writes_afterwards(pair, early):
    sent = pair.send("a", 1, [b"\xff" * LARGE] * 8)
    if early:
        await pair.settle()
    buffers, arrived = pair.receive("b", 1, [LARGE] * 8)
    _, waiting = pair.receive("b", 2, [10])
    unread = pair.send("a", 3, [noise(LARGE)])
    await is_begun(buffers[0])
    for me, peer in ("ba", "ab"):
        pair.ports[me].disconnect(peer)
    for ending in (waiting, unread):
        assert isinstance(await ending.wait(), ConnectionLost)
    cut = is_cut(buffers, await arrived.wait())
    assert isinstance(pair.ports["a"], InprocPort) or cut
    await sent.wait()
    before = [bytes(buffer) for buffer in buffers]
    pair.connect()
    await pair.settle()
    assert buffers == before
    assert pair.lost.empty()


async def test_a_disconnect_of_the_receiver_alone_is_safe(pair):
    pair.send("a", 1, [b"\xff" * LARGE] * 8)
    buffers, arrived = pair.receive("b", 1, [LARGE] * 8)
    await is_begun(buffers[0])
    pair.ports["b"].disconnect("a")
    is_cut(buffers, await arrived.wait())
    before = [bytes(buffer) for buffer in buffers]
    later = pair.send("a", 2, [b"\xff" * LARGE])
    for _ in range(2000):
        await asyncio.sleep(0)
    pair.ports["a"].disconnect("b")
    assert isinstance(await later.wait(), ConnectionLost)
    pair.connect()
    await pair.settle()
    assert buffers == before


async def test_a_connection_that_both_ends_dropped_can_be_made_again_many_times(pair):
    for round_ in range(5):
        pair.send("a", 100 + round_, [noise(LARGE)])
        pair.receive("a", 200 + round_, [20])
        for me, peer in ("ab", "ba"):
            pair.ports[me].disconnect(peer)
        pair.connect()
        assert await pair.move([noise(LARGE)], "ab"[round_ % 2]) == [noise(LARGE)]
    assert pair.lost.empty()


async def test_endings_come_later_and_may_call_the_port(pair):
    first, second = Ending(), Ending()

    def again(error: PDError | None) -> None:
        first(error)
        pair.ports["b"].disconnect("a")

    pair.ports["b"].receive("a", 1, [bytearray(10)], again)
    pair.ports["b"].receive("a", 2, [bytearray(10)], second)
    pair.send("a", 1, [noise(10)])
    assert not first.is_here
    assert await first.wait() is None
    assert isinstance(await second.wait(), ConnectionLost)


async def test_closing_ends_everything(pair):
    _, waiting = pair.receive("a", 2, [LARGE])
    sent = pair.send("a", 3, [noise(LARGE)])
    pair.ports["a"].close()
    pair.ports["a"].close()
    for ending in (waiting, sent):
        assert isinstance(await ending.wait(), ConnectionLost)
    with pytest.raises(ConnectionLost, match="b is not connected"):
        pair.send("a", 4, [b"x"])
    with pytest.raises(ConnectionLost, match="closed"):
        pair.ports["a"].connect("b", pair.ports["b"].address, print)


async def test_a_peer_is_told_of_a_port_that_closed(pair):
    await pair.settle()
    _, arrived = pair.receive("b", 1, [LARGE])
    pair.ports["a"].close()
    assert isinstance(await arrived.wait(), ConnectionLost)
    peer, error = await asyncio.wait_for(pair.lost.get(), 20)
    assert (peer, type(error)) == ("a", ConnectionLost)
    with pytest.raises(ConnectionLost, match="a is not connected"):
        pair.send("b", 4, [b"x"])
    await asyncio.sleep(0)
    assert pair.lost.empty()


async def test_a_lost_peer_leaves_the_others_alone_and_may_come_back(pair, make):
    third = make()
    lost: asyncio.Queue[str] = asyncio.Queue()
    third.connect("a", pair.ports["a"].address, lambda *_: None)
    pair.ports["a"].connect("c", third.address, lambda peer, _: lost.put_nowait(peer))
    arrived = Ending()
    pair.ports["a"].receive("c", 1, [bytearray(1)], arrived)
    third.send("a", 1, [b"x"], Ending())
    assert await arrived.wait() is None
    third.close()
    assert await asyncio.wait_for(lost.get(), 20) == "c"
    assert await pair.move([noise(LARGE)]) == [noise(LARGE)]
    again = make()
    again.connect("a", pair.ports["a"].address, lambda *_: None)
    pair.ports["a"].connect("c", again.address, lambda *_: None)
    buffer, arrived = bytearray(LARGE), Ending()
    pair.ports["a"].receive("c", 2, [buffer], arrived)
    again.send("a", 2, [noise(LARGE)], Ending())
    assert await arrived.wait() is None
    assert buffer == noise(LARGE)
    again.close()


# ---- UCX alone --------


def listening() -> set[int]:
    """Return the TCP ports on which this machine listens."""
    rows = Path("/proc/net/tcp").read_text("ascii").splitlines()[1:]
    return {int(row.split()[1].split(":")[1], 16) for row in rows if row.split()[3] == "0A"}


PEER = """
import asyncio, sys
from pdactors.transport.ucx import UcxPort

async def main():
    port = UcxPort("lo", "")
    print(port.address.hex(), flush=True)
    port.connect("a", bytes.fromhex(sys.stdin.readline()), lambda *_: None)
    port.receive("a", 1, [bytearray(1 << 20)], lambda error: None)
    block = bytearray(b"\\xff") * int(sys.argv[1])
    port.send("a", 2, [block] * int(sys.argv[2]), lambda error: None)
    await asyncio.sleep(300)

asyncio.run(main())
"""


async def test_a_peer_process_that_is_killed_ends_its_transfers():
    peer = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        PEER,
        str(LARGE),
        str(NUM_BLOCKS),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert peer.stdout is not None
    assert peer.stdin is not None
    port, lost = UcxPort("lo", ""), Ending()
    try:
        address = bytes.fromhex((await peer.stdout.readline()).decode())
        port.connect("b", address, lambda _, error: lost(error))
        peer.stdin.write(port.address.hex().encode() + b"\n")
        sent, arrived, never, unread = (Ending() for _ in range(4))
        port.send("b", 1, [noise(1 << 20)], sent)
        assert await sent.wait() is None
        buffers = [bytearray(LARGE) for _ in range(NUM_BLOCKS)]
        port.receive("b", 2, buffers, arrived)
        port.receive("b", 3, [bytearray(1)], never)
        port.send("b", 4, [noise(LARGE)], unread)
        await is_begun(buffers[0])
        peer.kill()
        for ending in (arrived, never, unread, lost):
            assert isinstance(await ending.wait(), ConnectionLost)
        assert not buffers[-1][-1]  # it was in mid-transfer
    finally:
        port.close()
        with contextlib.suppress(ProcessLookupError):
            peer.kill()
        await peer.wait()


async def test_an_idle_port_sleeps(monkeypatch):
    turns = 0
    turn = UcxPort._turn

    def count(port: UcxPort, planned: bool = False) -> None:
        nonlocal turns
        turns += 1
        turn(port, planned)

    monkeypatch.setattr(UcxPort, "_turn", count)
    pair = Pair(PORTS["ucx"])
    await pair.move([noise(LARGE)])
    await asyncio.sleep(0.2)
    turns = 0
    await asyncio.sleep(0.5)
    assert turns < 20  # a port that spins takes thousands
    for port in pair.ports.values():
        port.close()


async def test_a_port_listens_where_it_is_told_to():
    before = listening()
    port = UcxPort("lo", "31500-31520")
    found = listening() - before
    port.close()
    assert any(31500 <= number <= 31520 for number in found)


async def test_a_device_that_does_not_exist_is_an_error_that_names_it():
    with pytest.raises(ConfigError, match="no_such_device"):
        UcxPort("no_such_device", "")


def test_the_device_of_a_host_is_found_by_its_address():
    assert device_of("127.0.0.1") == "lo"
    assert device_of("localhost") == "lo"


@pytest.mark.parametrize("host", ["192.0.2.1", "no such host"])
def test_a_host_of_another_machine_has_no_device_here(host):
    with pytest.raises(ConfigError, match=host):
        device_of(host)


async def test_without_ucxx_the_error_names_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ucxx", None)
    with pytest.raises(ConfigError, match=r"pip install 'pdactors\[ucx\]'"):
        UcxPort("lo", "")


def test_what_the_environment_sets_is_left_alone(monkeypatch):
    speed = {"ZCOPY_THRESH": "0", "TCP_RX_SEG_SIZE": "256k"}
    for key in ("TLS", "NET_DEVICES", "TCP_PORT_RANGE", *speed):
        monkeypatch.delenv(f"UCX_{key}", raising=False)
    chosen = ucx._settings("lo", "30000-30010")
    assert chosen == {"TLS": "tcp", "NET_DEVICES": "lo", "TCP_PORT_RANGE": "30000-30010", **speed}
    monkeypatch.setenv("UCX_TLS", "rc")
    assert ucx._settings("", "") == speed

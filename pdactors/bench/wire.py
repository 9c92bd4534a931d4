"""UCX against a raw socket: two processes, on loopback or in two network namespaces, in turns in the same run.

parent --starts--> receiver, sender    each: python -m pdactors.bench.wire JOB
       <-- address of its port, one line; --> the other's address; <-- Figures, one line
"""

from __future__ import annotations

import asyncio
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import msgspec
import numpy as np
from msgspec import Struct

from pdactors.errors import ConfigError, PDError
from pdactors.kv.frame import checksum
from pdactors.transport.ucx import UcxPort

NUM_BLOCKS = 48  # of a process's arena; more than its caches hold
BLOCKS_PER_TRANSFER = 16
IN_FLIGHT = 3
IDLE_S = 2.0
DEADLINE_S = 120
LINK_S = 2.0


class Side(Struct, frozen=True):
    """One end of a wire: the command that enters its network, its device and address."""

    enter: tuple[str, ...]
    device: str
    host: str


class Job(Struct, frozen=True):
    """What one process does."""

    kind: str  # ucx, checked (ucx, with checksums at both ends) or socket
    role: str  # send or receive
    device: str
    host: str
    block_bytes: int
    num_transfers: int


class Figures(Struct, frozen=True):
    """What one process measured."""

    seconds: float
    cpu_s: float
    idle_cpu: float  # of a core, once everything had arrived


class WireResult(Struct, frozen=True):
    """UCX, and the raw socket in the same run as its limit; medians. CPU is of both ends together."""

    gb_s: float
    limit_gb_s: float
    ratio: float
    cpu_s_per_gb: float
    limit_cpu_s_per_gb: float
    cpu_ratio: float
    idle_cpu: float  # of a core, the busier end
    checked_cpu_ratio: float | None = None  # with each transfer's checksum made by the sender and by the receiver


LOOPBACK = (Side((), "lo", "127.0.0.1"), Side((), "lo", "127.0.0.1"))


def compare(
    sides: tuple[Side, Side] = LOOPBACK,
    *,
    block_bytes: int = 737_280,
    num_transfers: int = 100,
    rounds: int = 3,
    checked: bool = False,
) -> WireResult:
    """Move transfers of 16 blocks from the first side to the second, by UCX and by a raw socket in turns.

    With `checked` by UCX once more, with checksums.

    Raises:
        PDError: a process failed.
    """
    kinds = ("ucx", "socket", *(("checked",) if checked else ()))
    found: dict[str, list[tuple[Figures, Figures]]] = {kind: [] for kind in kinds}
    for _ in range(rounds):
        for kind, figures in found.items():
            figures.append(_run(kind, sides, block_bytes, num_transfers))
    gb = block_bytes * BLOCKS_PER_TRANSFER * num_transfers / 1e9
    speed = {kind: statistics.median(gb / sender.seconds for sender, _ in figures) for kind, figures in found.items()}
    cpu = {kind: statistics.median((a.cpu_s + b.cpu_s) / gb for a, b in figures) for kind, figures in found.items()}
    return WireResult(
        gb_s=round(speed["ucx"], 3),
        limit_gb_s=round(speed["socket"], 3),
        ratio=round(speed["ucx"] / speed["socket"], 3),
        cpu_s_per_gb=round(cpu["ucx"], 3),
        limit_cpu_s_per_gb=round(cpu["socket"], 3),
        cpu_ratio=round(cpu["ucx"] / cpu["socket"], 3),
        idle_cpu=round(max(end.idle_cpu for pair in found["ucx"] for end in pair), 4),
        checked_cpu_ratio=round(cpu["checked"] / cpu["socket"], 3) if checked else None,
    )


@contextmanager
def namespaces(rate: str = "") -> Iterator[tuple[Side, Side]]:
    """Make two network namespaces joined by a veth pair, limited to `rate` ("1gbit") in both directions; needs root.

    Raises:
        ConfigError: this process may not, or `ip` is missing.
    """
    names = [f"pdw{os.getpid()}{end}" for end in "ab"]
    hosts = ["10.77.0.1", "10.77.0.2"]
    with ExitStack() as stack:
        for name in names:
            _ip("netns", "add", name)
            stack.callback(_ip, "netns", "delete", name)
        _ip("link", "add", "wire", "netns", names[0], "type", "veth", "peer", "name", "wire", "netns", names[1])
        for name, host in zip(names, hosts, strict=True):
            _ip("-n", name, "address", "add", f"{host}/30", "dev", "wire")
            _ip("-n", name, "link", "set", "wire", "up")
            _ip("-n", name, "link", "set", "lo", "up")
            if rate:
                limit = f"tc qdisc add dev wire root tbf rate {rate} burst 1mb latency 50ms"
                _ip("netns", "exec", name, *limit.split())
        _await_link(names)
        first, second = (
            Side(("ip", "netns", "exec", name), "wire", host) for name, host in zip(names, hosts, strict=True)
        )
        yield first, second


def _await_link(names: Sequence[str]) -> None:
    """Wait until the wire carries: UCX knows no device before."""
    deadline = time.monotonic() + LINK_S
    while time.monotonic() < deadline:
        shown = [
            subprocess.run(["ip", "-n", name, "-br", "link", "show", "wire"], capture_output=True, text=True).stdout  # noqa: S603, S607
            for name in names
        ]
        if all(" UP " in line for line in shown):
            return
        time.sleep(0.02)


def _ip(*arguments: str) -> None:
    try:
        subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)  # noqa: S603, S607
    except FileNotFoundError as error:
        raise ConfigError("network namespaces need the command `ip` (iproute2)") from error
    except subprocess.CalledProcessError as error:
        raise ConfigError(f"ip {' '.join(arguments)}: {error.stderr.strip()}") from error


def _run(kind: str, sides: tuple[Side, Side], block_bytes: int, num_transfers: int) -> tuple[Figures, Figures]:
    """Run a sender on the first side and a receiver on the second."""
    with ExitStack() as stack:
        ends = []
        for side, role in zip(sides, ("send", "receive"), strict=True):
            job = Job(kind, role, side.device, side.host, block_bytes, num_transfers)
            command = [*side.enter, sys.executable, "-m", "pdactors.bench.wire", msgspec.json.encode(job).decode()]
            end = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)  # noqa: S603
            ends.append(stack.enter_context(end))
            stack.callback(end.kill)
        lines = [end.stdout.readline() for end in ends if end.stdout]
        for end, line in zip(ends, reversed(lines), strict=True):
            assert end.stdin is not None
            end.stdin.write(line)
            end.stdin.flush()
        try:
            sender, receiver = (
                msgspec.json.decode(end.communicate(timeout=DEADLINE_S)[0], type=Figures) for end in ends
            )
        except (msgspec.DecodeError, subprocess.TimeoutExpired) as error:
            raise PDError(f"measuring {kind} between {sides[0].host} and {sides[1].host} failed: {error}") from error
    return sender, receiver


# ---- One process --------


def main(argument: str) -> None:
    """Do a job; talk with the parent over standard input and output."""
    job = msgspec.json.decode(argument, type=Job)
    figures = asyncio.run(_over_ucx(job)) if job.kind != "socket" else _over_socket(job)
    sys.stdout.write(msgspec.json.encode(figures).decode() + "\n")


def _tell(address: str) -> str:
    """Give this end's address away for the other's."""
    sys.stdout.write(address + "\n")
    sys.stdout.flush()
    return sys.stdin.readline().strip()


def _blocks(job: Job) -> list[memoryview]:
    return [memoryview(bytearray(b"\1") * job.block_bytes) for _ in range(NUM_BLOCKS)]


def _row(blocks: Sequence[memoryview], number: int) -> list[memoryview]:
    """Return the blocks of a transfer, which lie apart."""
    return [blocks[(number * 5 + i * 7) % len(blocks)] for i in range(BLOCKS_PER_TRANSFER)]


async def _over_ucx(job: Job) -> Figures:
    port = UcxPort(job.device, "")
    port.connect("peer", bytes.fromhex(_tell(port.address.hex())), lambda *_: None)  # transfers tell
    blocks, end = _blocks(job), memoryview(bytearray(1))
    start, back = (port.send, port.receive) if job.role == "send" else (port.receive, port.send)
    slots = asyncio.Semaphore(IN_FLIGHT)

    def check(buffers: Sequence[memoryview]) -> None:
        if job.kind == "checked":
            checksum(np.frombuffer(buffer, np.uint8) for buffer in buffers)

    async def move(call: Callable[..., None], tag: int, buffers: Sequence[memoryview]) -> None:
        done: asyncio.Future[PDError | None] = asyncio.get_running_loop().create_future()
        if call == port.send:
            check(buffers)
        call("peer", tag, buffers, done.set_result)
        error = await done
        if call == port.receive:
            check(buffers)
        slots.release()
        if error:
            raise error

    async def run(first: int, count: int) -> None:
        async with asyncio.TaskGroup() as group:
            for tag in range(first, first + count):
                await slots.acquire()
                group.create_task(move(start, tag, _row(blocks, tag)))
        await slots.acquire()
        await move(back, first + count, [end])  # the receiver has it all

    await run(1, IN_FLIGHT)
    began, cpu = time.perf_counter(), time.process_time()
    await run(100, job.num_transfers)
    seconds, used = time.perf_counter() - began, time.process_time() - cpu
    cpu = time.process_time()
    await asyncio.sleep(IDLE_S)
    idle = (time.process_time() - cpu) / IDLE_S
    port.close()
    return Figures(seconds, used, idle)


def _over_socket(job: Job) -> Figures:
    if job.role == "send":
        host, port = _tell("").rsplit(":", 1)
        connection = socket.create_connection((host, int(port)))
    else:
        with socket.create_server((job.host, 0)) as server:
            _tell(f"{job.host}:{server.getsockname()[1]}")
            connection = server.accept()[0]
    blocks = _blocks(job)
    with connection:
        for count in (IN_FLIGHT, job.num_transfers):  # the first to warm up
            began, cpu = time.perf_counter(), time.process_time()
            for number in range(count):
                for block in _row(blocks, number):
                    if job.role == "send":
                        connection.sendall(block)
                    elif connection.recv_into(block, 0, socket.MSG_WAITALL) != len(block):
                        raise PDError("the sender went away")
            if job.role == "send":
                connection.recv(1)
            else:
                connection.sendall(b"x")
        return Figures(time.perf_counter() - began, time.process_time() - cpu, 0.0)


if __name__ == "__main__":
    main(sys.argv[1])

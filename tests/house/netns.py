"""Several machines on one: network namespaces with an address each, on one switch, with an optional rate limit.

    with namespaces(2, rate="1gbit") as hosts:
        with hosts[0].launch("n0", arguments, ready_file), hosts[1].launch("n1", arguments, other_file):
            with hosts[0].entered():
                ... a client ...
            print(hosts[1].counters())

The switch is a bridge in a namespace of its own, so nothing is added to the machine's network, and all is gone with the
namespaces. It needs root; `missing()` says what lacks.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from pdactors.actors.discovery import Ready, read_ready_file

INTERFACE = "net0"
CLONE_NEWNET = 0x40000000
READY_S, END_S = 120.0, 15.0
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Counters:
    """What went over a host's interface since it was made."""

    received_bytes: int
    sent_bytes: int


class Launched:
    """One `pdactors launch`, which was ready."""

    def __init__(self, process: subprocess.Popen[bytes], ready: Ready) -> None:
        self.process = process
        self.ready = ready

    def kill(self) -> None:
        """End it as a power cut would."""
        self.process.kill()
        self.process.wait(END_S)

    def terminate(self) -> int:
        """End it as an operator would; return its exit status."""
        self.process.terminate()
        return self.process.wait(END_S)


@dataclass(frozen=True)
class Host:
    """A machine as far as the network goes."""

    namespace: str
    address: str

    def popen(self, command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
        """Start a command here; options are those of `subprocess.Popen`, and the process is the command's own."""
        return subprocess.Popen(["ip", "netns", "exec", self.namespace, *command], **options)

    def run(self, command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[bytes]:
        """Run a command here; options are those of `subprocess.run`."""
        return subprocess.run(["ip", "netns", "exec", self.namespace, *command], check=False, **options)

    def pdactors(self, *arguments: str, timeout_s: float = 60.0) -> subprocess.CompletedProcess[bytes]:
        """Run `pdactors ...` here and return what it said."""
        return self.run([*PDACTORS, *arguments], capture_output=True, timeout=timeout_s)

    @contextmanager
    def launch(
        self, node: str, arguments: Sequence[str], ready_file: Path, clock_ahead_s: int = 0
    ) -> Iterator[Launched]:
        """Run `pdactors launch --node NODE` here, with the log on our stderr, from when it is ready to the block's end.

        Its CLOCK_MONOTONIC may be ahead of ours, as another machine's would be.

        Raises:
            ChildProcessError: it ended before it was ready, or did not get ready.
        """
        command = [*PDACTORS, "launch", "--node", node, "--ready-file", str(ready_file), *arguments]
        if clock_ahead_s:
            command = ["unshare", "--time", "--monotonic", str(clock_ahead_s), *command]
        with self.popen(command, stdout=subprocess.DEVNULL, start_new_session=True) as process:
            try:
                yield Launched(process, _ready(ready_file, process))
            finally:
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(END_S)
                process.kill()

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Have this thread, and those that it starts, open their sockets here: a client is made inside."""
        with open("/proc/thread-self/ns/net") as home, open(f"/run/netns/{self.namespace}") as here:
            _enter(here.fileno())
            try:
                yield
            finally:
                _enter(home.fileno())

    def serves(self) -> bool:
        """Say whether a gateway at this host's port 7080 could serve a request; takes a moment where it could not."""
        try:
            with self.entered(), urlopen(f"http://{self.address}:7080/health", timeout=5.0):
                return True
        except OSError:  # also what is not 200
            time.sleep(0.2)
            return False

    def counters(self) -> Counters:
        """Read the interface's counters."""
        (link,) = json.loads(_ip("-n", self.namespace, "-s", "-j", "link", "show", INTERFACE))
        return Counters(link["stats64"]["rx"]["bytes"], link["stats64"]["tx"]["bytes"])

    def plug(self, is_in: bool) -> None:
        """Put the cable in, or pull it."""
        _ip("-n", self.namespace, "link", "set", INTERFACE, "up" if is_in else "down")


PDACTORS = (sys.executable, "-m", "pdactors.cli.main")


@cache
def missing() -> str:
    """Say why there can be no namespaces; "" if there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None or shutil.which("tc") is None:
        return "network namespaces need ip and tc (iproute2)"
    try:
        with namespaces(1, rate="1gbit"):
            return ""
    except subprocess.CalledProcessError as error:
        return f"network namespaces cannot be made: {error.stderr.decode().strip()}"


@contextmanager
def namespaces(count: int, *, rate: str = "") -> Iterator[list[Host]]:
    """Make `count` hosts, 10.77.0.1 and so on, that reach each other at `rate` ("1gbit") each way, or unlimited.

    Raises:
        CalledProcessError: the kernel does not let us.
    """
    run = secrets.token_hex(3)
    switch = f"pd-{run}-switch"
    with ExitStack() as opened:
        _add(switch, opened)
        _ip("-n", switch, "link", "add", "br0", "type", "bridge")
        _ip("-n", switch, "link", "set", "br0", "up")
        hosts = [Host(f"pd-{run}-{i}", f"10.77.0.{i + 1}") for i in range(count)]
        for i, host in enumerate(hosts):
            _add(host.namespace, opened)
            _connect(host, switch, f"port{i}", rate)
        yield hosts


def _add(namespace: str, opened: ExitStack) -> None:
    _ip("netns", "add", namespace)
    opened.callback(_ip, "netns", "del", namespace)
    _ip("-n", namespace, "link", "set", "lo", "up")


def _connect(host: Host, switch: str, port: str, rate: str) -> None:
    """Lay a cable to the switch; each end limits what it sends."""
    space = host.namespace
    _ip("-n", switch, "link", "add", port, "type", "veth", "peer", "name", INTERFACE, "netns", space)
    _ip("-n", switch, "link", "set", port, "master", "br0", "up")
    _ip("-n", space, "address", "add", f"{host.address}/24", "dev", INTERFACE)
    _ip("-n", space, "link", "set", INTERFACE, "up")
    if rate:
        for where, device in ((space, INTERFACE), (switch, port)):
            limit = ("tbf", "rate", rate, "burst", "256kb", "latency", "50ms")
            _run("tc", "-n", where, "qdisc", "add", "dev", device, "root", *limit)


def two_hosts() -> Iterator[list[Host]]:
    """Make two machines, or skip with the reason: what fixtures of them yield."""
    if why := missing():
        pytest.skip(why)
    with namespaces(2) as made:
        yield made


def _ready(path: Path, process: subprocess.Popen[bytes]) -> Ready:
    deadline = time.monotonic() + READY_S
    while not path.exists():
        if process.poll() is not None:
            raise ChildProcessError(f"the launch ended with status {process.returncode} before it was ready")
        if time.monotonic() > deadline:
            process.send_signal(signal.SIGTERM)
            raise ChildProcessError(f"the launch was not ready within {READY_S:.0f} s")
        time.sleep(0.02)
    return read_ready_file(path)


def _enter(fd: int) -> None:
    if _libc.setns(fd, CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns failed")


def _ip(*arguments: str) -> bytes:
    return _run("ip", *arguments)


def _run(*command: str) -> bytes:
    return subprocess.run(command, capture_output=True, check=True).stdout

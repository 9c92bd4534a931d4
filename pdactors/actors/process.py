"""Child processes as the supervisor sees them: `Process`, and `Nursery`, which forks engines from one loaded model."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import msgspec
from msgspec import Struct

from pdactors.actors.spec import ActorSpec, encode_spec
from pdactors.config.logging import get_logger
from pdactors.errors import PDError

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
LARGE_BYTES = 256 << 10
NOTHING: Mapping[str, str] = MappingProxyType({})
MAX_REASON_BYTES = 2000
FORK_TIMEOUT_S = 20.0
_libc = ctypes.CDLL(None, use_errno=True)


class NurserySpec(Struct, frozen=True):
    """What a nursery needs: the model to load, and the socket on which the supervisor asks for engines."""

    run_id: str
    folder: str
    dtype: str
    block_tokens: int
    socket: int
    supervisor_pid: int


class LastWords:
    """The way in which a process that fails tells its supervisor why: what was its standard output."""

    def __init__(self) -> None:
        self._fd = os.dup(sys.stdout.fileno())
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever libraries print is log

    def say(self, reason: str) -> None:
        """Leave the reason behind; more than a pipe takes without a reader is cut."""
        os.write(self._fd, reason.encode()[:MAX_REASON_BYTES])


class Process:
    """A child of this process, started here or adopted as the subreaper; it is reaped as soon as it ends."""

    def __init__(self, pid: int, popen: subprocess.Popen[bytes] | None = None) -> None:
        self.pid = pid
        self._popen = popen
        self._fd = os.pidfd_open(pid)
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[int] = self._loop.create_future()
        self._loop.add_reader(self._fd, self._reap)

    @property
    def status(self) -> int | None:
        """The exit status, negative for a signal; None while it lives."""
        return self._ended.result() if self._ended.done() else None

    def send(self, number: signal.Signals) -> None:
        """Signal it, if it still lives."""
        if not self._ended.done():
            signal.pidfd_send_signal(self._fd, number)

    async def ended(self) -> int:
        """Wait until it is dead and reaped; return its status."""
        return await asyncio.shield(self._ended)

    def reason(self) -> str:
        """Return what the dead process said about its end; "" if nothing, or if it was forked by a nursery."""
        if self._popen is None or self._popen.stdout is None:
            return ""
        with self._popen.stdout as words:
            os.set_blocking(words.fileno(), False)  # children of it may hold the pipe open
            return " ".join((words.read() or b"").decode(errors="replace").split())

    def _reap(self) -> None:
        self._loop.remove_reader(self._fd)
        _, status = os.waitpid(self.pid, 0)
        os.close(self._fd)
        code = os.waitstatus_to_exitcode(status)
        if self._popen is not None:
            self._popen.returncode = code
        self._ended.set_result(code)


def spawn(
    module: str, arguments: Sequence[str], data: bytes, fds: Sequence[int], environ: Mapping[str, str] = NOTHING
) -> Process:
    """Start `python -m module` with `data` on its standard input, the descriptors `fds`, and `environ` beside ours."""
    quiet = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "TRANSFORMERS_VERBOSITY": "error"}
    single = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # Ctrl-C while it imports; see die_with_parent
    try:
        popen = subprocess.Popen(  # noqa: S603 - this interpreter and our own arguments
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[fd for fd in fds if fd >= 0],
            env={**os.environ, **quiet, **single, **environ},
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    assert popen.stdin is not None
    try:
        popen.stdin.write(data)
        popen.stdin.close()
    except BrokenPipeError:
        pass  # it is dead already, which `ended` will tell
    return Process(popen.pid, popen)


def spawn_actor(spec: ActorSpec, environ: Mapping[str, str] = NOTHING) -> Process:
    """Start an actor in a Python of its own."""
    arguments = [spec.name, spec.run_id, str(spec.supervisor_pid)]
    return spawn("pdactors.actors", arguments, encode_spec(spec), msgspec.structs.astuple(spec.fds), environ)


class Nursery:
    """A process that has loaded the model and forks engines on request, so that they share libraries and weights.

    What is forked is handed over to this process, which must be a subreaper. A nursery that died is started again when
    an engine is wanted.
    """

    def __init__(self, folder: str, dtype: str, block_tokens: int, fds: Sequence[int]) -> None:
        self._spec = NurserySpec("", folder, dtype, block_tokens, -1, os.getpid())
        self._fds = fds
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._lock = asyncio.Lock()
        self.process: Process | None = None

    async def fork(self, spec: ActorSpec) -> Process:
        """Start an engine.

        Raises:
            PDError: the nursery ended, and its log line says why, or it does not answer.
        """
        async with self._lock:
            if self.process is None or self.process.status is not None:
                await self._start(spec.run_id)
            assert self._streams is not None
            reader, writer = self._streams
            data = encode_spec(spec)
            writer.write(len(data).to_bytes(4, "little") + data)
            try:
                async with asyncio.timeout(FORK_TIMEOUT_S):
                    return Process(int(await self._line(reader)))
            except TimeoutError:
                assert self.process is not None
                self.process.send(signal.SIGKILL)
                await self.process.ended()
                raise PDError(f"the nursery did not answer within {FORK_TIMEOUT_S:.0f} s") from None

    async def _start(self, run_id: str) -> None:
        get_logger(run_id=run_id).info("starting the process that loads the model", libraries="torch, transformers")
        ours, theirs = socket.socketpair()
        with theirs:
            spec = msgspec.structs.replace(self._spec, run_id=run_id, socket=theirs.fileno())
            arguments = ["nursery", spec.run_id, str(spec.supervisor_pid)]
            self.process = spawn(
                "pdactors.actors.nursery", arguments, msgspec.msgpack.encode(spec), [*self._fds, spec.socket]
            )
        self._streams = await asyncio.open_connection(sock=ours)
        await self._line(self._streams[0])

    async def _line(self, reader: asyncio.StreamReader) -> bytes:
        line = await reader.readline()
        if not line.endswith(b"\n"):
            assert self.process is not None
            status = await self.process.ended()
            raise PDError(self.process.reason() or f"the nursery ended with status {status}")
        return line

    async def close(self) -> None:
        """End the nursery."""
        if self._streams is not None:
            self._streams[1].close()
        if self.process is not None:
            self.process.send(signal.SIGKILL)
            await self.process.ended()


def pin(cores: Sequence[int]) -> None:
    """Have this thread, and those that it starts from now on, run on these cores only; any if there are none."""
    if cores:
        os.sched_setaffinity(0, cores)


def share_memory() -> None:
    """Have large blocks go back to the system when they are freed, and small ones to the other threads.

    Otherwise glibc, once it has freed a block of some megabytes, keeps twice that for each thread. To be called before
    the first thread.
    """
    _libc.mallopt(M_ARENA_MAX, 1)
    _libc.mallopt(M_MMAP_THRESHOLD, LARGE_BYTES)
    _libc.mallopt(M_TRIM_THRESHOLD, LARGE_BYTES)


def return_memory() -> None:
    """Give back what is free between blocks in use; takes a millisecond or two."""
    _libc.malloc_trim(0)


def become_subreaper() -> None:
    """Make this process the parent of its descendants' orphans."""
    _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with_parent(parent: int, how: signal.Signals) -> None:
    """Have the kernel send `how` to this process when its parent, which is `parent`, ends; leave if it has already.

    The signal comes again as each further thread of the parent dies.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the supervisor decides
    _libc.prctl(PR_SET_PDEATHSIG, how, 0, 0, 0)
    if is_orphan(parent):
        os._exit(1)


def is_orphan(parent: int) -> bool:
    """Say whether the parent is dead; its last threads may still be dying, and are our parent until then."""
    if os.getppid() != parent:
        return True
    try:
        state = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state in "ZX"

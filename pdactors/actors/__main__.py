"""The entry of an actor's process: `python -m pdactors.actors NAME RUN_ID`.

Its spec comes over standard input; if it fails, the reason goes out over standard output.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from pdactors.actors.actor import Actor
from pdactors.actors.discovery import remove_ready_file
from pdactors.actors.spec import ActorSpec, decode_spec
from pdactors.config.logging import configure, get_logger
from pdactors.errors import PDError
from pdactors.messages import Role
from pdactors.transport import Transport, transport_for

PR_SET_PDEATHSIG = 1
MAX_REASON_BYTES = 2000  # a pipe takes so much without a reader
_libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Read the spec, become the actor, leave with its status."""
    spec = decode_spec(sys.stdin.buffer.read())
    to_supervisor = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever libraries print is log
    configure()
    _die_with(spec)
    reason = asyncio.run(_live(spec))
    if _is_orphan(spec):
        remove_ready_file(Path(spec.ready_file), spec.run_id)
    sys.stderr.flush()
    if reason is not None:
        os.write(to_supervisor, reason.encode()[:MAX_REASON_BYTES])
    os._exit(0 if reason is None else 1)  # a step may be running in the worker thread; nothing is left to tidy up


def _die_with(spec: ActorSpec) -> None:
    """Have the kernel end this process with its supervisor.

    All are killed at once but for the gateway, which is told to stop, so that somebody removes the ready file. The
    signal comes again as each further thread of the supervisor dies.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the supervisor decides
    how = signal.SIGTERM if spec.role == "gateway" else signal.SIGKILL
    _libc.prctl(PR_SET_PDEATHSIG, how, 0, 0, 0)
    if _is_orphan(spec):  # it died before we asked
        os._exit(1)


def _is_orphan(spec: ActorSpec) -> bool:
    """Say whether the supervisor is dead; its last threads may still be dying, and are our parent until then."""
    if os.getppid() != spec.supervisor_pid:
        return True
    try:
        state = Path(f"/proc/{spec.supervisor_pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state in "ZX"


async def _live(spec: ActorSpec) -> str | None:
    """Be the actor; return why it failed, None if it was asked to stop."""
    log = get_logger(actor=spec.name, node=spec.node)
    try:
        actor = _class_of(spec.role)(spec, transport_for(spec.control))
        loop = asyncio.get_running_loop()
        # Not the loop's own handler: closing the loop would undo it, and a second signal would kill us then.
        signal.signal(signal.SIGTERM, lambda *_: loop.call_soon_threadsafe(actor.stop))
        await actor.run()
    except PDError as error:
        log.error("actor ends", code=error.code, reason=error.message)
        return error.message
    except Exception as error:
        log.exception("actor ends")
        return repr(error)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return None


def _class_of(role: Role) -> Callable[[ActorSpec, Transport], Actor]:
    """Import only what the role needs: engines bring torch, the gateway tokenizers."""
    if role == "router":
        from pdactors.actors.router import Router

        return Router
    if role == "gateway":
        from pdactors.actors.gateway import Gateway

        return Gateway
    if role == "migrator":
        from pdactors.actors.migrator import Migrator

        return Migrator
    if role == "prefill":
        from pdactors.actors.prefill import PrefillActor

        return PrefillActor
    if role == "decode":
        from pdactors.actors.decode import DecodeActor

        return DecodeActor
    raise ValueError(f"no process plays the role {role}")


if __name__ == "__main__":
    main()

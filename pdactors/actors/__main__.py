"""The entry of an actor's process: `python -m pdactors.actors NAME RUN SUPERVISOR`, with its spec on standard input."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from pdactors.actors.actor import Actor
from pdactors.actors.process import LastWords, die_with_parent, is_orphan, pin, share_memory
from pdactors.actors.ready_file import remove_ready_file
from pdactors.actors.spec import ActorSpec, decode_spec
from pdactors.config.logging import configure, get_logger
from pdactors.errors import PDError
from pdactors.transport import Transport, actors_transport

if TYPE_CHECKING:
    from pdactors.engine.model import PagedModel

MAX_FILES = 8192


def main() -> NoReturn:
    """Read the spec, become the actor, leave with its status."""
    spec = decode_spec(sys.stdin.buffer.read())
    last_words = LastWords()
    configure()
    # All are killed with their supervisor but for the gateway, so that clients hear of it, and for whoever has to
    # remove the ready file: these are told to stop.
    if spec.role == "gateway":
        _allow_files()
        share_memory()
    is_told = spec.role == "gateway" or spec.ready_file
    die_with_parent(spec.supervisor_pid, signal.SIGTERM if is_told else signal.SIGKILL)
    pin(spec.cores)
    live(spec, last_words)


def live(spec: ActorSpec, last_words: LastWords, model: PagedModel | None = None) -> NoReturn:
    """Be the actor that `spec` describes, then end the process; an engine brings its model along."""
    reason = asyncio.run(_live(spec, model))
    if spec.ready_file and is_orphan(spec.supervisor_pid):
        remove_ready_file(Path(spec.ready_file), spec.run_id)
    sys.stderr.flush()
    if reason is not None:
        last_words.say(reason)
    os._exit(0 if reason is None else 1)  # a step may be running in the worker thread; nothing is left to tidy up


async def _live(spec: ActorSpec, model: PagedModel | None) -> str | None:
    """Be the actor; return why it failed, None if it was asked to stop."""
    log = get_logger(actor=spec.name, node=spec.node)
    try:
        actor = _make(spec, actors_transport(spec.control, spec.keys, spec.io_cores), model)
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


def _allow_files() -> None:
    """Have room for many clients: the usual soft limit on open files is there for programs that use select()."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _make(spec: ActorSpec, transport: Transport, model: PagedModel | None) -> Actor:
    """Import only what the role needs: engines bring torch, the gateway tokenizers."""
    if spec.role == "router":
        from pdactors.actors.router import Router

        return Router(spec, transport)
    if spec.role == "gateway":
        from pdactors.actors.gateway import Gateway

        return Gateway(spec, transport)
    if spec.role == "migrator":
        from pdactors.actors.migrator import Migrator

        return Migrator(spec, transport)
    assert model is not None
    if spec.role == "prefill":
        from pdactors.actors.prefill import PrefillActor

        return PrefillActor(spec, transport, model)
    if spec.role == "decode":
        from pdactors.actors.decode import DecodeActor

        return DecodeActor(spec, transport, model)
    if spec.role == "worker":
        from pdactors.actors.worker import WorkerActor

        return WorkerActor(spec, transport, model)
    raise ValueError(f"no process plays the role {spec.role}")


if __name__ == "__main__":
    main()

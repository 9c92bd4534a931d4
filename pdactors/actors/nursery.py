"""The nursery's process: loads the model once and forks the machine's engines from it.

Torch is kept to one thread here: a fork may not cut through a pool of compute threads, so engines make their own.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import cast

import msgspec

from pdactors.actors.__main__ import live
from pdactors.actors.process import LastWords, NurserySpec, die_with_parent
from pdactors.actors.spec import ActorSpec, decode_spec
from pdactors.config.logging import configure, get_logger
from pdactors.engine.load import load_model
from pdactors.engine.model import PagedModel
from pdactors.engine.shape import ModelDtype
from pdactors.engine.store import progress_bar
from pdactors.errors import PDError

ADOPTION_TIMEOUT_S = 5.0


def main() -> None:
    """Load, then fork an engine for each spec that arrives."""
    spec = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=NurserySpec)
    last_words = LastWords()
    configure()
    die_with_parent(spec.supervisor_pid, signal.SIGKILL)
    log = get_logger(actor="nursery")
    log.info("loading model", folder=spec.folder, dtype=spec.dtype)
    began = time.monotonic()
    try:
        with progress_bar() as progress:
            model = load_model(
                Path(spec.folder),
                cast(ModelDtype, spec.dtype),
                block_tokens=spec.block_tokens,
                threads=1,
                progress=progress,
            )
    except PDError as error:
        log.error("the model cannot be served", code=error.code, reason=error.message)
        last_words.say(error.message)
        sys.exit(1)
    log.info("model loaded", seconds=round(time.monotonic() - began, 1), way=model.description)
    gc.collect()
    gc.freeze()  # what is here now is not looked at again, so that its pages stay shared
    with socket.socket(fileno=spec.socket) as asked:
        asked.sendall(b"ready\n")
        while (engine := _next_spec(asked)) is not None:
            asked.sendall(b"%d\n" % _fork(engine, model, asked, last_words))


def _next_spec(asked: socket.socket) -> ActorSpec | None:
    with asked.dup() as copy, copy.makefile("rb", buffering=0) as stream:
        head = stream.read(4)
        if not head:
            return None
        return decode_spec(_exactly(stream, int.from_bytes(head, "little")))


def _exactly(stream: object, size: int) -> bytes:
    data = b""
    while len(data) < size:
        data += stream.read(size - len(data))  # type: ignore[attr-defined]
    return data


def _fork(spec: ActorSpec, model: PagedModel, asked: socket.socket, last_words: LastWords) -> int:
    """Fork twice, so that the engine is nobody's child until the supervisor, the subreaper, adopts it."""
    read_end, write_end = os.pipe()
    middle = os.fork()
    if middle == 0:
        engine = os.fork()
        if engine == 0:
            os.close(read_end)
            os.close(write_end)
            asked.close()
            _be(spec, model, last_words)
        os.write(write_end, b"%d" % engine)
        os._exit(0)
    os.waitpid(middle, 0)
    os.close(write_end)
    with open(read_end, "rb") as reply:
        return int(reply.read())


def _be(spec: ActorSpec, model: PagedModel, last_words: LastWords) -> None:
    """Live as an engine; does not return."""
    deadline = time.monotonic() + ADOPTION_TIMEOUT_S
    while os.getppid() != spec.supervisor_pid:
        if time.monotonic() > deadline:
            os._exit(1)
        time.sleep(0.001)
    die_with_parent(spec.supervisor_pid, signal.SIGKILL)
    model.use_threads(spec.threads)
    live(spec, last_words, model)


if __name__ == "__main__":
    main()

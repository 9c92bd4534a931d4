"""Requests out of a trace in Mooncake's public form: one JSON object a line, read as far as it is needed.

    {"timestamp": 3000, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1, …]}

Timestamps are milliseconds, lengths tokens; each hash id stands for 512 tokens of the prompt, the last one for the
rest, and equal ids are equal prefixes. The form was published with Mooncake (FAST '25, kvcache-ai/Mooncake).
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from pdactors.bench.workload import Request
from pdactors.errors import ConfigError
from pdactors.messages import explain

BLOCK_TOKENS = 512  # that a hash id stands for
MAX_SCALE = float(BLOCK_TOKENS)  # so that each id still stands for a token
MAX_LINE_BYTES = 1 << 20
KIND = "trace"


class TraceLine(Struct, frozen=True):
    """One request of a trace. Fields that other traces add are not read."""

    timestamp: Annotated[float, Meta(ge=0)]
    input_length: Annotated[int, Meta(ge=1, le=2**24)]
    output_length: Annotated[int, Meta(ge=1, le=2**20)]
    hash_ids: tuple[Annotated[int, Meta(ge=0)], ...]


_decoder = msgspec.json.Decoder(TraceLine)


def read_trace(path: Path) -> Iterator[TraceLine]:
    """Yield the lines of a trace.

    Raises:
        ConfigError: the file cannot be read, has no request, or a line is wrong; names the line.
    """
    number, earlier = 0, 0.0
    try:
        with path.open("rb") as file:
            while text := file.readline(MAX_LINE_BYTES + 1):
                number += 1
                line = _parse(text)
                if line.timestamp < earlier:
                    raise ConfigError(f"timestamp {line.timestamp:g} is before {earlier:g}, the one before it")
                earlier = line.timestamp
                yield line
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except ConfigError as error:
        raise ConfigError(f"{path}, line {number}: {error.message}") from None
    if not number:
        raise ConfigError(f"{path} has no requests")


def trace_requests(path: Path, scale: float, vocabulary: Sequence[int], seed: str) -> Iterator[Request]:
    """Yield the trace's requests at its own times, the first one at once; lengths are divided by `scale`, at least 1.

    Equal hash ids give equal tokens of `vocabulary`, others random ones.

    Raises:
        ConfigError: as `read_trace`.
    """
    begin_ms: float | None = None
    for line in read_trace(path):
        begin_ms = line.timestamp if begin_ms is None else begin_ms
        answer = max(1, round(line.output_length / scale))
        yield Request(KIND, _prompt(line, scale, vocabulary, seed), answer, (line.timestamp - begin_ms) / 1000)


def _parse(text: bytes) -> TraceLine:
    if len(text) > MAX_LINE_BYTES:
        raise ConfigError(f"longer than {MAX_LINE_BYTES} bytes")
    try:
        line = _decoder.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(explain(error)) from None
    needed = -(-line.input_length // BLOCK_TOKENS)
    if len(line.hash_ids) != needed:
        raise ConfigError(
            f"{len(line.hash_ids)} hash_ids for an input_length of {line.input_length}; expected {needed}, one for "
            f"each {BLOCK_TOKENS} tokens"
        )
    return line


def _prompt(line: TraceLine, scale: float, vocabulary: Sequence[int], seed: str) -> tuple[int, ...]:
    """Put the blocks together. The i-th begins at round(512 i / scale), in every prompt alike."""
    tokens: list[int] = []
    for i, hash_id in enumerate(line.hash_ids):
        count = round(BLOCK_TOKENS * (i + 1) / scale) - round(BLOCK_TOKENS * i / scale)
        tokens += random.Random(f"{seed} {hash_id}").choices(vocabulary, k=count)  # noqa: S311 - nothing secret
    return tuple(tokens[: max(1, round(line.input_length / scale))])

"""Chaos: requests with known answers, put to a cluster whose actors are hurt all the time."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from pdactors.bench.free_ports import free_ports
from pdactors.bench.mischief import Deed, Mischief
from pdactors.bench.prompts import make_prompts
from pdactors.client import AsyncClient, launch
from pdactors.client_messages import TokenEvent
from pdactors.config.cluster import ClusterConfig
from pdactors.config.load import load
from pdactors.engine import store
from pdactors.engine.manifest import Progress, silent
from pdactors.errors import PDError
from pdactors.text.tokenizer import Tokenizer

NUM_QUESTIONS = 24
MAX_PROMPT_TOKENS, MAX_ANSWER_TOKENS = 600, 160
PATIENCE_S = 120.0  # longer than all that may happen to a request takes; then it hangs
SETTLE_S = 60.0  # until every actor is back and nothing is held
CLEAR = {"worker_lost", "overloaded", "timeout", "connection"}  # errors that say what the client may do: ask again
LEFT_SHARE = 0.1  # of the clients leave in the middle

Fields = dict[str, Any]
Said = list[tuple[int, str]]  # token ids and texts


class Chaos(Struct):
    """What `pdactors chaos --json` prints. Every request is right, left by its client, or one of the others."""

    seed: int
    requests: int = 0
    right: int = 0
    left: int = 0
    clear_errors: int = 0
    wrong: int = 0
    hung: int = 0
    leaked: int = 0
    errors: dict[str, int] = msgspec.field(default_factory=dict)  # by code
    faults: list[str] = msgspec.field(default_factory=list)  # what was wrong, hung or leaked
    events: list[Deed] = msgspec.field(default_factory=list)

    @property
    def is_good(self) -> bool:
        return not (self.wrong or self.hung or self.leaked)

    def note(self, what: str, fault: str = "") -> None:
        """Count a request that ended that way."""
        self.requests += 1
        setattr(self, what, getattr(self, what) + 1)
        self.faults += [f"{what}: {fault}"] if fault else []


def chaos(
    file: Path | None,
    *,
    sets: Sequence[str] = (),
    minutes: float,
    seed: int,
    concurrency: int = 16,
    progress: Progress = silent,
) -> Chaos:
    """Start the cluster of a file on free ports, and hold its answers against those that it gave before, one by one.

    Raises:
        PDError: the cluster does not start, or does not answer before anything is hurt.
    """
    config = load(file, sets=sets)
    tokenizer = Tokenizer(store.resolve(config.model.path, fetch=True, progress=progress))
    with launch(file, sets=[*sets, *free_ports(config)]) as cluster:
        token = config.security.client_token()
        dead_after_s = config.router.dead_after_ms / 1000
        mischief = Mischief(cluster.ready.run_id, cluster.zmq, token, dead_after_s, seed)
        run = _Run(cluster.zmq, token, seed, questions(tokenizer, config, seed), progress)
        asyncio.run(run.live(mischief, 60 * minutes, concurrency))
    return run.result


def questions(tokenizer: Tokenizer, config: ClusterConfig, seed: int) -> list[Fields]:
    """Return requests of many lengths, greedy and sampled."""
    rng = random.Random(seed)  # noqa: S311 - nothing secret
    longest = min(MAX_PROMPT_TOKENS, config.model.max_model_len // 2)
    most = min(MAX_ANSWER_TOKENS, config.model.max_model_len // 4)
    asked: list[Fields] = []
    for i, prompt in enumerate(make_prompts(tokenizer, NUM_QUESTIONS, max_tokens=longest, seed=seed)):
        fields: Fields = {"prompt_token_ids": prompt, "max_tokens": rng.randint(1, most), "ignore_eos": i % 3 > 0}
        asked.append(fields | ({"temperature": 1.0, "seed": rng.randrange(1000)} if i % 2 else {}))
    return asked


class _Run:
    """One run: its questions, what is right, and how it went."""

    def __init__(self, address: str, token: str, seed: int, asked: list[Fields], progress: Progress) -> None:
        self.result = Chaos(seed)
        self._address = address
        self._token = token
        self._asked = asked
        self._right: list[Said] = []
        self._progress = progress
        self._random = random.Random(seed + 1)  # noqa: S311 - nothing secret

    async def live(self, mischief: Mischief, seconds: float, concurrency: int) -> None:
        """Learn the answers, then ask under mischief, then look whether all is as before."""
        for fields in self._asked:
            self._right.append([])
            await self._hear(fields, self._right[-1])
            self._progress("alone", len(self._right), len(self._asked))
        end_s = time.monotonic() + seconds
        numbers = itertools.cycle(range(len(self._asked)))
        async with asyncio.TaskGroup() as group:
            group.create_task(mischief.go_on(seconds))
            for _ in range(concurrency):
                group.create_task(self._keep_asking(numbers, end_s))
        self.result.events = mischief.deeds
        await self._settle()

    async def _keep_asking(self, numbers: itertools.cycle[int], end_s: float) -> None:
        while time.monotonic() < end_s:
            await self._ask(next(numbers))
            self._progress("requests", self.result.requests, 0)

    async def _ask(self, number: int) -> None:
        """Ask once, and say what became of it."""
        right, said = self._right[number], Said()
        leaves = self._random.random() < LEFT_SHARE
        stop_at = self._random.randrange(len(right)) if leaves else None
        try:
            async with asyncio.timeout(PATIENCE_S):
                await self._hear(self._asked[number], said, stop_at)
        except TimeoutError:
            return self.result.note("hung", f"question {number} after {len(said)} tokens")
        except PDError as error:
            self.result.errors[error.code] = self.result.errors.get(error.code, 0) + 1
            if said != right[: len(said)] or error.code not in CLEAR:
                return self.result.note("wrong", f"question {number}: {error.code}: {error.message}; {said[-3:]}")
            return self.result.note("clear_errors")
        if leaves and said == right[: len(said)]:
            return self.result.note("left")
        if said != right:
            return self.result.note("wrong", f"question {number}: {said[-3:]} after {len(said)} of {len(right)} tokens")
        return self.result.note("right")

    async def _hear(self, fields: Fields, said: Said, stop_at: int | None = None) -> None:
        async with AsyncClient(self._address, token=self._token) as client:
            async for event in client.events(**fields):
                if isinstance(event, TokenEvent):
                    said.append((event.token_id, event.text))
                if stop_at is not None and len(said) > stop_at:
                    return

    async def _settle(self) -> None:
        """Wait until every actor is ready and nothing is held, and note what is."""
        deadline = time.monotonic() + SETTLE_S
        while True:
            held = await self._held()
            if not held or time.monotonic() > deadline:
                break
            await asyncio.sleep(0.5)
        self.result.leaked = len(held)
        self.result.faults += [f"leaked: {what}" for what in held]

    async def _held(self) -> list[str]:
        try:
            async with asyncio.timeout(SETTLE_S), AsyncClient(self._address, token=self._token) as client:
                status, leaks = await client.status(), await client.leaks()
        except (PDError, TimeoutError) as error:
            return [f"no answer: {error}"]
        states = [f"{a['name']} is {a['state']}" for a in status["actors"] if a["state"] != "ready"]
        running = [f"{a['name']} runs {a['running']}" for a in status["actors"] if a["running"] or a["waiting"]]
        return [*states, *running, *(f"{what}: {found}" for what, found in leaks.items() if found)]

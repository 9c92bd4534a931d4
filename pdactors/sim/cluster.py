"""`SimCluster`: router, gateway and all nodes under the virtual clock; requests go in, records come out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from pdactors.bench.load import Record
from pdactors.bench.workload import Request
from pdactors.config.cluster import ClusterConfig
from pdactors.engine.limits import EngineLimits
from pdactors.engine.sequence import Sequence
from pdactors.errors import ConfigError
from pdactors.kv.layout import KVLayout
from pdactors.kv.prefix import cache_key
from pdactors.messages import (
    Adopted,
    CacheChanged,
    Cancel,
    Finished,
    Generate,
    Message,
    Migrated,
    Pinned,
    Prefilled,
    Rejected,
    Sampling,
)
from pdactors.policy.admission import Limits
from pdactors.policy.dispatch import Dispatcher
from pdactors.policy.tasks import Order
from pdactors.sim.clock import Clock
from pdactors.sim.cost import CostModel
from pdactors.sim.engine import SimEngine
from pdactors.sim.host import Host
from pdactors.sim.mover import SimMover
from pdactors.sim.network import Network
from pdactors.sim.node import SimNode
from pdactors.sim.shapes import ModelSize
from pdactors.token_ids import TokenIds

GATEWAY = "gateway"


@dataclass(eq=False)
class _Answer:
    """A request under way, as its client sees it."""

    request: Request
    begin_s: float
    stamps: list[float] = field(default_factory=list)
    num_tokens: int = 0
    cached_tokens: int = 0
    path: str = "none"


class SimCluster:
    """Runs one cluster file; `decode_cost` is how long decode engines' steps take, if not as others'.

    `knows_caches` False hides from the router what engines have cached.
    """

    def __init__(
        self,
        config: ClusterConfig,
        model: ModelSize,
        cost: CostModel,
        *,
        decode_cost: CostModel | None = None,
        wants_gaps: bool = True,
        knows_caches: bool = True,
    ) -> None:
        if config.mooncake:
            raise ConfigError(f"kv.store {config.kv.store} cannot be simulated; arena can")
        if config.kv.prune < 1:
            raise ConfigError("kv.prune cannot be simulated")
        self.config = config
        self.cost = cost
        self.decode_cost = decode_cost or cost
        self.clock = Clock()
        self.wants_gaps = wants_gaps  # a stamp for each token, not only for the first and the last
        self.records: list[Record] = []
        self.max_model_len = min(config.model.max_model_len, model.max_position)
        layout = KVLayout(
            model.num_layers, model.num_kv_heads, model.head_dim, config.kv.block_tokens, config.model.dtype
        )
        key = cache_key(model.name, layout.fingerprint)
        self.dispatcher = Dispatcher(
            Limits.of(config, max_model_len=self.max_model_len, prefix_key=key, layout=layout.fingerprint)
        )
        self._knows_caches = knows_caches
        self._answers: dict[str, _Answer] = {}
        self._num_asked = 0
        self._ended: Callable[[], object] = _nothing
        limits = EngineLimits.of(config, eos_ids=(), prefix_key=key)
        hosts: dict[str, Host] = {}
        self.nodes: dict[str, SimNode] = {}
        for section in config.node:
            host = hosts.setdefault(section.host, Host(self.clock, cost.crowd))
            self.nodes[section.name] = SimNode(self, section, host, layout, limits, self.max_model_len)
        self.engines: dict[str, SimEngine] = {n: e for node in self.nodes.values() for n, e in node.engines.items()}
        self._movers = {node.mover.member.name: node.mover for node in self.nodes.values()}
        self._network = self._wire()
        self._start()

    def _wire(self) -> Network:
        network, links = Network(self.clock), self.cost.links
        for node in self.nodes.values():
            for way in ("out", "in"):
                network.add((way, node.section.name, "host"), links.host.bytes_s)
                network.add((way, node.section.name, "net"), links.rack.bytes_s)
                network.add((way, node.section.rack), links.uplink_bytes_s)
        return network

    def _start(self) -> None:
        for node in self.nodes.values():
            if self.config.migrators_own:
                self.dispatcher.migrator_ready(node.mover.member, 0.0)
        for engine in self.engines.values():
            self.dispatcher.joined(engine.member, engine.load(), 0.0)
        self.clock.after(self.config.router.heartbeat_ms / 1000, self._beat)

    # ---- Requests --------

    def run(
        self, requests: Iterable[Request], *, patience_s: float, is_enough: Callable[[Record], bool] | None = None
    ) -> list[Record]:
        """Have requests arrive when they are due, each taking `patience_s` at most; return what became of them.

        `is_enough` is told of each that ends, and may say that no more need be known.
        """
        is_over = [False]

        def ended() -> None:
            is_over[0] = is_enough is not None and is_enough(self.records[-1])

        self._ended = ended
        has_more = self._schedule(iter(requests), patience_s)
        self.clock.run(lambda: is_over[0] or (not has_more() and not self._answers))
        return self.records

    def run_closed(
        self, requests: Iterator[Request], concurrency: int, *, patience_s: float, seconds: float = float("inf")
    ) -> list[Record]:
        """Keep so many requests in flight until there are no more, or the time is over."""
        is_over = [False]

        def next_one() -> None:
            request = next(requests, None) if self.clock.now < seconds else None
            if request is None:
                is_over[0] = True
            else:
                self._ask(request, self.clock.now, patience_s)

        self._ended = next_one
        for _ in range(concurrency):
            next_one()
        self.clock.run(lambda: is_over[0] and not self._answers)
        return self.records

    def _schedule(self, coming: Iterator[Request], patience_s: float) -> Callable[[], bool]:
        """Draw one request at a time, so that a million of them take no memory before they are due."""
        is_left = [True]

        def next_one() -> None:
            request = next(coming, None)
            if request is None:
                is_left[0] = False
                return
            self.clock.at(request.at_s, arrive, request)

        def arrive(request: Request) -> None:
            self._ask(request, request.at_s, patience_s)
            next_one()

        next_one()
        return lambda: is_left[0]

    def _ask(self, request: Request, begin_s: float, patience_s: float) -> None:
        self._num_asked += 1
        name = str(self._num_asked)
        self._answers[name] = _Answer(request, begin_s)
        room = self.max_model_len - len(request.prompt)
        if room < 1:
            return self._fail(name, "prompt_too_long", f"{len(request.prompt)} tokens leave none to generate")
        sampling = Sampling(max_tokens=min(request.max_tokens, room), ignore_eos=True)
        ask = Generate(name, TokenIds.of(request.prompt), sampling)
        self.clock.after(self.cost.request_s + self.cost.control_s, self._generate, ask)
        self.clock.after(patience_s, self._lose_patience, name, patience_s)
        return None

    def _generate(self, ask: Generate) -> None:
        if ask.request in self._answers:
            self._perform(self.dispatcher.generate(GATEWAY, ask, self.clock.now))

    def _lose_patience(self, name: str, patience_s: float) -> None:
        if name in self._answers:
            self._fail(name, "timeout", f"no end after {patience_s:.0f} s")
            self.clock.after(self.cost.control_s, self._cancel, name)

    def _cancel(self, name: str) -> None:
        self._perform(self.dispatcher.cancel(Cancel(name), self.clock.now))

    def token(self, sequence: Sequence, times_s: list[float]) -> None:
        """A sequence got tokens at these times; the client has each one message later."""
        answer = self._answers.get(sequence.request)
        if answer is None:
            return
        delivery_s = self.cost.control_s
        if not answer.stamps:
            answer.cached_tokens = sequence.num_cached
        if sequence.handle is not None:
            answer.path = sequence.path
        answer.num_tokens = len(sequence.tokens)
        if self.wants_gaps or not answer.stamps:
            answer.stamps += [time_s + delivery_s for time_s in times_s]
        if len(sequence.tokens) >= sequence.sampling.max_tokens:
            if not self.wants_gaps and answer.num_tokens > 1:
                answer.stamps = [answer.stamps[0], times_s[-1] + delivery_s]
            self._end(sequence.request, times_s[-1] + delivery_s)

    def _fail(self, name: str, code: str, reason: str) -> None:
        self._end(name, self.clock.now, code, reason)

    def _end(self, name: str, end_s: float, error: str | None = None, reason: str = "") -> None:
        answer = self._answers.pop(name)
        self.records.append(
            Record(
                kind=answer.request.kind,
                prompt_tokens=len(answer.request.prompt),
                begin_s=answer.begin_s,
                sent_s=answer.begin_s,
                stamps=tuple(answer.stamps),
                end_s=end_s,
                num_tokens=answer.num_tokens if error is None else 0,
                cached_tokens=answer.cached_tokens,
                path=answer.path,
                error=error,
                reason=reason,
            )
        )
        self._ended()

    # ---- The router --------

    def post(self, sender: str, message: Message) -> None:
        """Have the router hear from an actor, one message later."""
        self.clock.after(self.cost.control_s, self._hear, sender, message)

    def _hear(self, sender: str, message: Message) -> None:
        now, router = self.clock.now, self.dispatcher
        if isinstance(message, Prefilled):
            self._perform(router.prefilled(sender, message, now))
        elif isinstance(message, Finished):
            self._perform(router.finished(sender, message, now))
        elif isinstance(message, Adopted):
            self._perform(router.adopted(sender, message))
        elif isinstance(message, Pinned):
            self._perform(router.pinned(sender, message, now))
        elif isinstance(message, Migrated):
            self._perform(router.migrated(sender, message, now))
        elif isinstance(message, CacheChanged) and self._knows_caches:
            router.cache_changed(sender, message)

    def _perform(self, orders: list[Order]) -> None:
        for to, message in orders:
            if isinstance(message, Rejected):
                if message.request in self._answers:
                    self._fail(message.request, message.code, message.message)
                continue
            actor = self.engines.get(to) or self._movers[to]
            self.clock.after(self.cost.control_s, actor.receive, message)

    def _beat(self) -> None:
        """Heartbeats that say something new, and the router's look at what is overdue."""
        now = self.clock.now
        for engine in self.engines.values():
            if (load := engine.news()) is not None:
                self._perform(self.dispatcher.joined(engine.member, load, now))
        self._perform(self.dispatcher.tick(now))
        self.clock.after(self.config.router.heartbeat_ms / 1000, self._beat)

    # ---- Between nodes --------

    def mover(self, name: str) -> SimMover:
        """Return the migrator of that name."""
        return self._movers[name]

    def send(self, source: SimNode, target: SimNode, num_bytes: float, done: Callable[[], object]) -> None:
        """Send bytes from node to node; they share what they pass with others."""
        one, other, links = source.section, target.section, self.cost.links
        if one.host == other.host:
            passes: tuple[tuple[str, ...], ...] = (("out", one.name, "host"), ("in", other.name, "host"))
            latency_s = links.host.latency_s
        else:
            passes = (("out", one.name, "net"), ("in", other.name, "net"))
            latency_s = links.rack.latency_s
            if one.rack != other.rack:
                passes = (*passes, ("out", one.rack), ("in", other.rack))
                latency_s = links.far.latency_s
        self._network.send(num_bytes, passes, latency_s, done)

    def check(self) -> None:
        """Hold all books against themselves."""
        self.dispatcher.check()
        for node in self.nodes.values():
            node.check()


def _nothing() -> None:
    pass

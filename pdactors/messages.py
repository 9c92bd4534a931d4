"""Every control message and its codec, one section per receiver. Messages say where KV is; they never carry KV.

Addressing is the transport's business: a connection carries its sender's name and incarnation in its identity, so
no message repeats them. What concerns a request names it by `(request, attempt)`; anything else is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal, TypeAlias, TypeVar

import msgspec
from msgspec import Meta, Struct

from pdactors.errors import BadRequest
from pdactors.stamps import Clock, Echo, Stamps
from pdactors.token_ids import NO_TOKENS, TokenIds, from_wire, to_wire

PROTOCOL_VERSION = 1
MAX_REASON = 400  # characters of an error about what came

Role = Literal["router", "gateway", "migrator", "prefill", "decode", "worker", "supervisor"]
State = Literal["starting", "ready", "draining", "stopping", "lost"]
Path = Literal["lease", "cuda_ipc", "ucx", "store", "none"]
FinishReason = Literal["stop", "length", "cancelled"]
Priority = Literal["interactive", "batch"]
Codec = Literal["none", "int8", "int4"]  # of KV on the wire
Direction = Literal["send", "receive"]
Phase = Literal["prefill", "decode"]  # a step is of the latter where every sequence computes one token only
# Seconds by which durations of steps are sorted: vLLM's, and smaller ones.
STEP_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10, 40)

TokenId = Annotated[int, Meta(ge=0, lt=2**31)]
MaxTokens = Annotated[int, Meta(ge=1, le=2**20)]
MinTokens = Annotated[int, Meta(ge=0, le=2**20)]
Temperature = Annotated[float, Meta(ge=0.0, le=100.0)]
TopP = Annotated[float, Meta(gt=0.0, le=1.0)]
TopK = Annotated[int, Meta(ge=0, le=2**20)]  # 0: all
Seed = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Logprobs = Annotated[int, Meta(ge=0, le=20)]  # alternatives to report beside the chosen token; 0: none


class Message(Struct, frozen=True, tag=True, forbid_unknown_fields=True, omit_defaults=True):
    """A control message; the tag is the class name."""


# ---- Parts --------


class Sampling(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How tokens are chosen and when a sequence ends. Randomness is keyed by (seed, position)."""

    max_tokens: MaxTokens = 64
    min_tokens: MinTokens = 0
    temperature: Temperature = 0.0
    top_p: TopP = 1.0
    top_k: TopK = 0
    seed: Seed = 1
    ignore_eos: bool = False
    logprobs: Logprobs = 0


class Lease(Struct, frozen=True):
    """A lease record of the node's arena: its index in the table and the generation it was written with."""

    index: int
    generation: int


class Segment(Struct, frozen=True):
    """Blocks `start ..` of a sequence's table, which `owner` lends under `lease`."""

    owner: str
    lease: Lease
    start: int
    blocks: tuple[int, ...]


class KVHandle(Struct, frozen=True):
    """Where a sequence's KV is: arena blocks of one node, in token order, each run of them under its owner's lease.

    `num_tokens` tokens are stored; the last block is partly filled unless `num_tokens` divides evenly. Segments of
    another owner than `owner` are what the prefill itself borrows; without an `owner` all are lent for a move.
    """

    node: str
    owner: str
    layout: str  # fingerprint of the KVLayout that the blocks are written in
    segments: tuple[Segment, ...]
    num_tokens: int
    codec: Codec = "none"  # that it went through; after a lossy one it is good for its own request only
    num_pruned: int = 0  # tokens left out, other ones in each layer and head; those that follow keep their positions


class Blocks(Struct, frozen=True, omit_defaults=True):
    """One owner's account: free + cached + used + leased_out = total. `leased_in` belongs to other owners."""

    total: int = 0
    free: int = 0
    cached: int = 0
    used: int = 0
    leased_out: int = 0
    leased_in: int = 0


class StepTimes(Struct, frozen=True, omit_defaults=True):
    """Durations of recent steps, milliseconds."""

    mean: float = 0.0
    p50: float = 0.0
    p99: float = 0.0


class PhaseUse(Struct, frozen=True, omit_defaults=True):
    """What recent steps of a phase achieved: shares of the machine's FLOP/s and of its memory bandwidth."""

    num_steps: int = 0
    flops_share: float = 0.0
    bandwidth_share: float = 0.0


class Load(Struct, frozen=True, omit_defaults=True):
    """What an actor has to do; engines fill all of it, others what applies."""

    running: int = 0
    waiting: int = 0
    pending_tokens: int = 0  # prompt tokens not computed yet
    max_sequences: int = 0  # sequences it can hold at once
    max_blocks: int = 0  # blocks that it could own if every other engine kept to its minimum
    blocks: Blocks = Blocks()
    step_ms: StepTimes = StepTimes()
    blocks_lacking: int = 0  # what waits for memory needs so many more
    prompt_tokens_computed: int = 0
    num_preempted: int = 0
    prefill_use: PhaseUse = PhaseUse()
    decode_use: PhaseUse = PhaseUse()
    way: str = ""  # how an engine computes its model, and why not on our kernels
    busy_s: float = 0.0  # what all its steps took together


class LeaseInfo(Struct, frozen=True):
    """One live lease as its lessor sees it."""

    lessor: str
    holder: str
    request: str
    attempt: int
    num_blocks: int
    expires_s: float


class StepCounts(Struct, frozen=True):
    """An engine's steps of one phase whose batch is at most `max_batch`, a power of two, and more than half of that."""

    phase: Phase
    max_batch: int
    counts: tuple[int, ...]  # that took at most so long, see STEP_BOUNDS_S, and last of those that took longer
    seconds: float  # all of them together


class TransferCounts(Struct, frozen=True):
    """Transfers of KV of one kind that have ended; bytes and seconds are those of transfers that arrived whole."""

    direction: Direction
    path: Path
    codec: Codec
    num_stored: int
    num_failed: int
    num_bytes: int
    seconds: float


class Move(Struct, frozen=True):
    """KV that is leaving for another node, as its source sees it."""

    request: str
    to: str
    codec: Codec
    num_blocks: int
    num_stored: int  # of the blocks; some may have been there before
    num_bytes: int  # that were sent


class Report(Struct, frozen=True, omit_defaults=True):
    """An actor's account of itself at one moment, for `status` and `leaks`; what it counts, it has since it began."""

    name: str
    role: Role
    node: str
    rack: str
    state: State
    pid: int
    incarnation: int
    load: Load = Load()
    requests: tuple[str, ...] = ()  # requests that it still holds anything for
    leases: tuple[LeaseInfo, ...] = ()  # leases that it has given
    faults: tuple[str, ...] = ()  # what its check() found wrong
    dropped: dict[str, int] = {}  # late, duplicate, unknown messages, by kind
    counts: dict[str, int] = {}  # what else it counts, by name
    steps: tuple[StepCounts, ...] = ()
    transfers: tuple[TransferCounts, ...] = ()
    moves: tuple[Move, ...] = ()
    stamps: Stamps | None = None  # of the request that was asked for


class TopLogprob(Struct, frozen=True, array_like=True):
    token_id: int
    logprob: float


class PrefillPart(Struct, frozen=True, omit_defaults=True):
    """What the prefill did for a request; travels with its first token."""

    cached_tokens: int
    received_s: float  # CLOCK_MONOTONIC of the engine's machine, as the next two: elsewhere only differences count
    begin_s: float
    end_s: float


class DecodePart(Struct, frozen=True, omit_defaults=True):
    """How decode got the KV; travels with the first token that it computed."""

    path: Path
    sent_s: float  # when the prefill sent Prefilled
    adopted_s: float
    path_reason: str = ""
    codec: Codec = "none"
    num_pruned: int = 0


class Token(Struct, frozen=True, omit_defaults=True):
    """One token of one request. `index` counts generated tokens from 0."""

    request: str
    attempt: int
    index: int
    token_id: int
    finish: FinishReason | None = None
    logprob: float | None = None
    top: tuple[TopLogprob, ...] = ()
    prefill: PrefillPart | None = None
    decode: DecodePart | None = None
    sampled_s: float | None = None  # if the configuration asks for it


class Member(Struct, frozen=True, omit_defaults=True):
    """An actor of the cluster as the router knows it."""

    name: str
    role: Role
    node: str
    rack: str
    pid: int
    incarnation: int
    slot: int = -1  # an engine's place in its node's arena
    state: State = "starting"
    address: str = ""


# ---- To whoever listens, from an actor that connects --------


class Hello(Message, frozen=True):
    """First message on every connection between actors: who it is, and what both sides must agree in."""

    protocol: int
    version: str
    member: Member
    layout: str
    model: str
    join_token: str
    mode: str
    max_model_len: int
    run_id: str = ""  # a supervisor that joins from another machine learns it when it is welcomed

    def __repr__(self) -> str:
        return f"Hello({self.member!r})"  # without the join token


class Welcome(Message, frozen=True):
    """The listener accepts the connection; `member` is the listener itself."""

    member: Member
    run_id: str


class Refusal(Message, frozen=True):
    """The listener refuses the connection for good; `reason` names both values that differ."""

    reason: str


class Stranger(Message, frozen=True):
    """The listener does not know the sender (it may have restarted): say Hello again."""


# ---- To the router --------


class Heartbeat(Message, frozen=True):
    state: State
    load: Load = Load()
    echo: Echo | None = None


class Generate(Message, frozen=True):
    """Gateway: a client's request, tokenised. After the first attempt it goes on after the tokens `generated`."""

    request: str
    prompt: TokenIds
    sampling: Sampling
    priority: Priority = "interactive"
    deadline_s: float | None = None  # CLOCK_MONOTONIC
    save_final_kv: bool = True
    attempt: int = 1
    generated: TokenIds = NO_TOKENS


class Resume(Message, frozen=True):
    """Router to gateway: what was under way is lost, `attempt` is the next. Back: the tokens that the client has.

    From then on the gateway takes tokens of that attempt only.
    """

    request: str
    attempt: int
    generated: TokenIds = NO_TOKENS


class Cancel(Message, frozen=True):
    request: str


class Prefilled(Message, frozen=True):
    """Prefill: the prompt's KV is complete and leased, the first token is on its way to the gateway."""

    request: str
    attempt: int
    first_token: TokenId
    handle: KVHandle
    sent_s: float


class Adopted(Message, frozen=True):
    request: str
    attempt: int


class Finished(Message, frozen=True):
    """An engine: the sequence ended; its last token went to the gateway."""

    request: str
    attempt: int
    num_tokens: int


class Failed(Message, frozen=True):
    """An engine: the request cannot go on here."""

    request: str
    attempt: int
    code: str
    message: str


class Migrated(Message, frozen=True):
    """Migrator: the KV of a sequence is here now, under a lease of ours; what moved, and how."""

    request: str
    attempt: int
    handle: KVHandle
    num_bytes: int  # on the wire
    seconds: float
    codec: Codec


class Stranded(Message, frozen=True):
    """Migrator: the KV of a sequence cannot be brought over; computing it again may help."""

    request: str
    attempt: int
    reason: str


class CacheChanged(Message, frozen=True):
    """An engine or a migrator: digests of blocks that its prefix cache gained and lost."""

    added: tuple[bytes, ...] = ()
    evicted: tuple[bytes, ...] = ()


class Pinned(Message, frozen=True):
    """An engine: what it lends of a Pin; None if it has nothing of it any more."""

    request: str
    attempt: int
    start: int
    segment: Segment | None = None


class Exited(Message, frozen=True):
    """Supervisor: that process, of a supervisor its node, is dead and reaped; nothing that it held is written now."""

    name: str
    incarnation: int
    is_final: bool = False  # it was retired; there is no successor


class DrainActor(Message, frozen=True):
    """Gateway: give an engine no new work, and retire it when what it has is finished."""

    query: int
    name: str


class Scale(Message, frozen=True):
    """Gateway: start or drain engines until a node has `count` of a role."""

    query: int
    node: str
    role: Role
    count: Annotated[int, Meta(ge=0, le=256)]


class EnginesStarted(Message, frozen=True):
    """Supervisor: what came of StartEngines; `error` says what did not."""

    query: int
    names: tuple[str, ...]
    error: str = ""


class Drain(Message, frozen=True):
    """Supervisor: its node is about to end, and with the router's node the run: give it nothing new."""


class Fence(Message, frozen=True):
    """Router, to the supervisor: that actor is silent; kill and reap it, then say Exited."""

    name: str
    incarnation: int
    reason: str


class Inspect(Message, frozen=True):
    """Ask for a report, with the stamps of a `request`; the gateway asks the router, the router asks everyone."""

    query: int
    request: str = ""


class Inspected(Message, frozen=True):
    query: int
    report: Report


# ---- To the supervisor --------


class StartEngines(Message, frozen=True):
    query: int
    node: str
    role: Role
    count: int


class Retire(Message, frozen=True):
    """End an engine that holds nothing any more, for good."""

    name: str
    incarnation: int


# ---- To an engine, from the router --------


class Prefill(Message, frozen=True):
    request: str
    attempt: int
    prompt: TokenIds
    sampling: Sampling
    priority: Priority = "interactive"
    save_final_kv: bool = True
    prefix: tuple[Segment, ...] = ()  # KV of the prompt's beginning that other engines lend
    ship_to: str = ""  # the migrator that finished blocks are sent to while later ones are computed
    prefix_tokens: int = 0  # where what is lent and the engine's own end; the last block may be partly filled
    generated: TokenIds = NO_TOKENS  # by a lost attempt; the next token is sampled after these


class Decode(Message, frozen=True):
    """Take the sequence over where its KV lies, which is that of all but the last token, and go on."""

    request: str
    attempt: int
    prompt: TokenIds
    generated: TokenIds
    sampling: Sampling
    handle: KVHandle
    sent_s: float
    priority: Priority = "interactive"
    save_final_kv: bool = True
    path: Path = "lease"  # how the KV came to where the handle says
    path_reason: str = ""  # why not a faster way
    waited_s: float = 0.0  # since Prefilled, on the router's clock: that of another node's prefill means nothing here


class Pin(Message, frozen=True):
    """Lend the cached blocks of these digests, blocks `start ..` of a prompt, to whoever prefills the request."""

    request: str
    attempt: int
    start: int
    digests: tuple[bytes, ...]


class CopyOut(Message, frozen=True):
    """Copy what the sequence borrows into blocks of your own and give the leases back: their owner needs the room."""

    request: str
    attempt: int


class Release(Message, frozen=True):
    """Let go of everything that this attempt holds; idempotent."""

    request: str
    attempt: int


# ---- To the gateway --------


class Tokens(Message, frozen=True):
    """An engine: the tokens of one step, one per sequence."""

    tokens: tuple[Token, ...]


class Rejected(Message, frozen=True):
    """Router: the request ends here with an error."""

    request: str
    code: str
    message: str
    retry_after_s: float | None = None


class Fleet(Message, frozen=True):
    """Router, to every actor: who is in the cluster and where they listen."""

    mode: str
    members: tuple[Member, ...]
    num_requests: int = 0
    is_draining: bool = False  # nothing new is taken
    num_queued: int = 0  # of the requests: those that no engine has taken; router.max_queue limits them
    sent_s: float = 0.0  # on the router's clock


class Answered(Message, frozen=True):
    """Router: the answer to a DrainActor or Scale; an `error` says why nothing was done."""

    query: int
    started: tuple[str, ...] = ()
    draining: tuple[str, ...] = ()
    error: str = ""


class Surveyed(Message, frozen=True):
    """Router: the reports of everyone that answered an Inspect."""

    query: int
    reports: tuple[Report, ...]
    in_flight: tuple[str, ...]
    silent: tuple[str, ...] = ()
    clocks: dict[str, Clock] = {}  # by actor, as far as they are known


# ---- Engine and migrator of one node --------


class WantExtents(Message, frozen=True):
    count: int  # missed: others are asked for them
    idle: int = 0  # for a cache, of what nobody has


class Extents(Message, frozen=True):
    """Migrator: these extents are yours now."""

    extents: tuple[int, ...]


class RecallExtents(Message, frozen=True):
    """Migrator: give back up to `count` extents that hold nothing live."""

    count: int
    idle: bool = False  # to keep some free: only out of caches, and not what will soon be asked for again


class Retired(Message, frozen=True):
    """Router, to the migrator: the engine of that slot is gone for good; what it owned is free."""

    slot: int


class ReturnExtents(Message, frozen=True):
    extents: tuple[int, ...]


class Publish(Message, frozen=True):
    """An engine, to its node's store: blocks of its own, the rest of a sequence's table, are the store's now."""

    request: str
    attempt: int
    blocks: tuple[int, ...]
    digests: tuple[bytes, ...] = ()  # of the leading ones, which are full
    part: bytes | None = None  # the digest of a part of the one after them
    parent: bytes | None = None  # the digest before them
    done: Prefilled | None = None  # goes to the router with all of the table; its handle names what is borrowed of it


# ---- Migrators: from the router and the engines of the node, and among each other --------


class Migrate(Message, frozen=True):
    """Router: bring a sequence's KV, which lies on your node, to the migrator `target`, which tells us.

    Where KV is pruned the prefill gets it, and passes it on to its migrator with what it has packed.
    """

    request: str
    attempt: int
    handle: KVHandle
    target: str
    digests: tuple[bytes, ...] = ()  # of the leading blocks, as far as they are known
    priority: Priority = "interactive"
    time_left_s: float | None = None  # no deadline, since your clock may be another machine's


class Announce(Message, frozen=True):
    """Prefill: these blocks of a prompt of `num_tokens` tokens are final; send them ahead to the migrator `target`."""

    request: str
    attempt: int
    target: str
    segment: Segment
    num_tokens: int
    digests: tuple[bytes, ...] = ()
    priority: Priority = "interactive"


class DataPort(Message, frozen=True):
    """Where KV for this migrator is sent, in the words of its data transport."""

    transport: str
    address: bytes
    connection: int = 0  # counts those that it had to you: at another than you know, drop yours and connect anew


class Offer(Message, frozen=True):
    """Source: KV of `num_tokens` tokens is to come."""

    request: str
    attempt: int
    layout: str
    num_tokens: int
    digests: tuple[bytes, ...] = ()
    priority: Priority = "interactive"
    num_pruned: Annotated[int, Meta(ge=0)] = 0


class Taken(Message, frozen=True):
    """Destination: the offer is taken; it has the first `num_ready` blocks already."""

    request: str
    attempt: int
    num_ready: int


class Ask(Message, frozen=True):
    """Source: room for blocks `start .. start + count`, to be sent in one transfer."""

    request: str
    attempt: int
    transfer: int
    start: int
    count: int
    codec: Codec = "none"


class Grant(Message, frozen=True):
    """Destination: there is room; send under this tag, with this secret in the header."""

    request: str
    attempt: int
    transfer: int
    tag: int
    secret: bytes


class Stored(Message, frozen=True):
    """Destination: that transfer has arrived whole; or `error` says what was wrong with it."""

    request: str
    attempt: int
    transfer: int
    error: str = ""


class Abandon(Message, frozen=True):
    """A migrator to the other: this migration ends here."""

    request: str
    attempt: int
    reason: str


class Alive(Message, frozen=True):
    """A migrator's sign of life to the others: a silent data connection looks like an idle one."""


Control: TypeAlias = (
    Hello | Welcome | Refusal | Stranger | Heartbeat | Generate | Resume | Cancel
    | Prefilled | Adopted | Finished | Failed | CacheChanged | Pinned | Exited | Drain | Fence | Inspect | Inspected
    | Prefill | Decode | Pin | CopyOut | Release | Tokens | Rejected | Fleet | Surveyed
    | Migrate | Announce | Migrated | Stranded | DataPort | Offer | Taken | Ask | Grant | Stored | Abandon | Alive
    | WantExtents | Extents | RecallExtents | ReturnExtents | Publish | Retired
    | DrainActor | Scale | StartEngines | EnginesStarted | Retire | Answered
)  # fmt: skip

# ---- Codec --------

T = TypeVar("T", bound=Message)
_encoder = msgspec.msgpack.Encoder(enc_hook=to_wire)
control_decoder: msgspec.msgpack.Decoder[Control] = msgspec.msgpack.Decoder(Control, dec_hook=from_wire)


def encode(message: Message) -> list[bytes]:
    """Encode as frames; today always one."""
    return [_encoder.encode(message)]


def decode(decoder: msgspec.msgpack.Decoder[T], frames: Sequence[bytes | memoryview]) -> T:
    """Decode frames from a peer.

    Raises:
        BadRequest: not exactly one frame, not msgpack, an unknown tag, a missing, unknown or ill-typed field.
    """
    if len(frames) != 1:
        raise BadRequest(f"expected 1 frame, got {len(frames)}")
    try:
        return decoder.decode(frames[0])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(explain(error)) from error


def explain(error: Exception) -> str:
    """Put a msgspec error with the field first: `max_tokens: expected `int` >= 1`."""
    what, _, place = str(error)[:MAX_REASON].partition(" - at `$")  # it may quote what came
    place = place.rstrip("`").lstrip(".").removeprefix("body.")
    return f"{place}: {what[:1].lower()}{what[1:]}" if place else f"malformed message: {what}"

"""What clients and the gateway say to each other: JSON lines over TCP, the same objects in msgpack over ZeroMQ."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta, Struct

from pdactors.errors import PDError
from pdactors.messages import (
    Codec,
    FinishReason,
    Logprobs,
    MaxTokens,
    Message,
    MinTokens,
    Path,
    Priority,
    Role,
    Sampling,
    Seed,
    Temperature,
    TokenId,
    TopK,
    TopP,
)

RequestId = Annotated[str, Meta(max_length=128)] | Annotated[int, Meta(ge=0, le=2**53)]
StopString = Annotated[str, Meta(min_length=1, max_length=256)]


class RequestBody(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A request as a client writes it. Exactly one of `prompt`, `messages`, `prompt_token_ids` is given."""

    id: RequestId | None = None
    prompt: str | None = None
    messages: tuple[dict[str, Any], ...] | None = None
    prompt_token_ids: tuple[TokenId, ...] | None = None
    max_tokens: MaxTokens = 64
    min_tokens: MinTokens = 0
    temperature: Temperature = 0.0
    top_p: TopP = 1.0
    top_k: TopK = 0
    seed: Seed = 1
    stop: StopString | Annotated[tuple[StopString, ...], Meta(max_length=16)] = ()
    ignore_eos: bool = False
    logprobs: Logprobs = 0
    priority: Priority = "interactive"
    deadline_ms: Annotated[float, Meta(gt=0.0, le=86_400_000.0)] | None = None
    save_final_kv: bool = True

    @property
    def num_characters(self) -> int:
        """How much text there is to tokenise, and the marks around messages."""
        texts = [message.get("content") for message in self.messages or ()]
        return (
            len(self.prompt or "") + sum(len(text) if isinstance(text, str) else 0 for text in texts) + 32 * len(texts)
        )

    def sampling(self, max_tokens: int) -> Sampling:
        """Return the engine's part of the request, with `max_tokens` as the model's length allows it."""
        return Sampling(
            max_tokens=max_tokens,
            min_tokens=min(self.min_tokens, max_tokens),
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            seed=self.seed,
            ignore_eos=self.ignore_eos,
            logprobs=self.logprobs,
        )


class Usage(Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


class Timing(Struct, frozen=True):
    """Milliseconds. `migration_ms` runs from the prefill's hand-over message to the adoption by decode."""

    queue_ms: float
    prefill_ms: float
    migration_ms: float
    ttft_ms: float
    tpot_ms: float
    total_ms: float


class LogprobEntry(Struct, frozen=True):
    token_id: int
    text: str
    logprob: float


class Logprob(Struct, frozen=True):
    """The chosen token's log-probability before temperature, and the best alternatives."""

    logprob: float
    top: tuple[LogprobEntry, ...]


class Event(Struct, frozen=True, tag_field="event"):
    """What the gateway answers; the tag is the event's name."""

    id: RequestId | None


class TokenEvent(Event, frozen=True, tag="token"):
    index: int
    token_id: int
    text: str
    logprobs: Logprob | msgspec.UnsetType = msgspec.UNSET
    sampled_s: float | msgspec.UnsetType = msgspec.UNSET  # engine.stamp_tokens: on the engine's monotonic clock


class DoneEvent(Event, frozen=True, tag="done"):
    finish_reason: FinishReason
    usage: Usage
    timing: Timing
    path: Path
    path_reason: str = ""  # why the KV took no faster way
    codec: Codec = "none"  # that it went through
    pruned_tokens: int = 0  # of the prompt, whose KV was left out
    request: str = ""  # our id, by which `trace` finds it


class ErrorEvent(Event, frozen=True, tag="error"):
    code: str
    message: str
    retry_after_s: float | msgspec.UnsetType = msgspec.UNSET

    @classmethod
    def of(cls, id: RequestId | None, error: PDError) -> ErrorEvent:
        """Say that a request, or with None the connection, ended with `error`."""
        retry = msgspec.UNSET if error.retry_after_s is None else error.retry_after_s
        return cls(id, error.code, error.message, retry)


class AnswerEvent(Event, frozen=True, tag="answer"):
    """The answer to a ClientAsk."""

    answer: dict[str, Any]


AnyEvent = TokenEvent | DoneEvent | ErrorEvent | AnswerEvent


class ClientHello(Message, frozen=True):
    protocol: int
    token: str = ""

    def __repr__(self) -> str:
        return f"ClientHello({self.protocol})"  # without the token


class ClientRequest(Message, frozen=True):
    body: RequestBody


class ClientCancel(Message, frozen=True):
    id: RequestId


class ClientPing(Message, frozen=True):
    pass


class ClientBye(Message, frozen=True):
    pass


class ClientAsk(Message, frozen=True):
    id: RequestId
    what: Literal["status", "leaks", "requests"]


class ClientTrace(Message, frozen=True):
    id: RequestId
    request: Annotated[str, Meta(max_length=128)] = ""  # our id or the client's; "" for the last one


class ClientDrain(Message, frozen=True):
    id: RequestId
    actor: str


class ClientScale(Message, frozen=True):
    id: RequestId
    node: str
    role: Role
    count: Annotated[int, Meta(ge=0, le=256)]


ToGateway: TypeAlias = (
    ClientHello
    | ClientRequest
    | ClientCancel
    | ClientPing
    | ClientBye
    | ClientAsk
    | ClientTrace
    | ClientDrain
    | ClientScale
)


class ClientWelcome(Message, frozen=True):
    run_id: str


class ClientEvents(Message, frozen=True):
    events: tuple[AnyEvent, ...]


class ClientPong(Message, frozen=True):
    pass


ToClient: TypeAlias = ClientWelcome | ClientEvents | ClientPong

_event_encoder = msgspec.json.Encoder()
to_gateway_decoder: msgspec.msgpack.Decoder[ToGateway] = msgspec.msgpack.Decoder(ToGateway)
to_client_decoder: msgspec.msgpack.Decoder[ToClient] = msgspec.msgpack.Decoder(ToClient)


def encode_line(event: Event) -> bytes:
    """Encode an event as one line of the TCP protocol."""
    return _event_encoder.encode(event) + b"\n"

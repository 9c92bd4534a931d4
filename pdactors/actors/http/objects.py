"""The objects of OpenAI's API, made of the gateway's events: whole answers, the chunks of a stream, errors. No I/O."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil

import msgspec
from msgspec import UNSET, Struct, UnsetType

from pdactors.client_messages import DoneEvent, ErrorEvent, TokenEvent, Usage
from pdactors.errors import PDError, error_for
from pdactors.openai_messages import ChatBody, OpenAIBody
from pdactors.text.detokenizer import token_bytes
from pdactors.text.tokenizer import Tokenizer

STATUS = {  # error code -> HTTP status; 500 for all others
    "bad_request": 400,
    "prompt_too_long": 400,
    "unauthorized": 401,
    "overloaded": 429,
    "worker_lost": 503,
    "connection": 503,
    "timeout": 504,
}
_TYPES = {401: "authentication_error", 429: "rate_limit_error"}
_CODES = {
    "prompt_too_long": "context_length_exceeded",
    "unauthorized": "invalid_api_key",
    "overloaded": "rate_limit_exceeded",
}


class PromptDetails(Struct, frozen=True):
    cached_tokens: int


class TokenUsage(Struct, frozen=True):
    """Sums over the answers; a prompt counts once for all `n` answers to it."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class Alternative(Struct, frozen=True):
    token: str
    logprob: float
    bytes: tuple[int, ...]


class ChatLogprob(Alternative, frozen=True):
    top_logprobs: tuple[Alternative, ...]


class ChatLogprobs(Struct, frozen=True):
    content: tuple[ChatLogprob, ...]
    refusal: None = None


class CompletionLogprobs(Struct, frozen=True):
    """`text_offset` counts characters from the answer's beginning."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] | None
    text_offset: list[int]


class CompletionChoice(Struct, frozen=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None


class ChatMessage(Struct, frozen=True):
    content: str
    role: str = "assistant"
    refusal: None = None


class Delta(Struct, frozen=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChoice(Struct, frozen=True):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None


class ChunkChoice(Struct, frozen=True):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None


class Completion(Struct, frozen=True):
    """A whole answer, or a chunk of a stream, whose `usage` is left out, null, or in the last one or all as asked."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: Sequence[CompletionChoice | ChatChoice | ChunkChoice]
    usage: TokenUsage | UnsetType | None = UNSET


class ErrorDetail(Struct, frozen=True):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorObject(Struct, frozen=True):
    error: ErrorDetail


@dataclass
class _Choice:
    """What one answer has come to."""

    text: list[str] = field(default_factory=list)
    tokens: list[TokenEvent] = field(default_factory=list)
    num_characters: int = 0  # of the tokens that were described
    has_begun: bool = False
    done: DoneEvent | None = None


class AnswerWriter:
    """Writes the answers to one HTTP request, whose form (completion or chat) `body` decides.

    `take` and `take_end` say what came; `chunk` and its sisters write it as a stream, `whole` at the end.
    """

    def __init__(self, body: OpenAIBody, tokenizer: Tokenizer, *, id: str, created: int, model: str, fingerprint: str):
        self._body = body
        self._tokenizer = tokenizer
        self._is_chat = isinstance(body, ChatBody)
        self._id = f"{'chatcmpl' if self._is_chat else 'cmpl'}-{id}"
        self._created, self._model, self._fingerprint = created, model, fingerprint
        self._choices: dict[int, _Choice] = {}
        self._encoder = msgspec.json.Encoder()

    # ---- A stream --------

    def token_chunk(self, index: int, event: TokenEvent, prompt_use: tuple[int, int]) -> bytes:
        """Write a token of answer `index`, to a prompt of so many tokens, of which so many were cached."""
        usage = self._so_far(Usage(prompt_use[0], event.index + 1, prompt_use[1]))
        choice = self._choices.setdefault(index, _Choice())
        logprobs = self._logprobs(choice, [event])
        if not self._is_chat:
            return self._chunk([CompletionChoice(index, event.text, self._completion_logprobs(logprobs))], usage)
        delta = Delta(content=event.text) if choice.has_begun else Delta("assistant", event.text)
        choice.has_begun = True
        return self._chunk([ChunkChoice(index, delta, self._chat_logprobs(logprobs))], usage)

    def end_chunk(self, index: int, event: DoneEvent) -> bytes:
        """Write why answer `index` ended."""
        self._choices.setdefault(index, _Choice()).done = event
        reason, usage = event.finish_reason, self._so_far(event.usage)
        if self._is_chat:
            return self._chunk([ChunkChoice(index, Delta(), finish_reason=reason)], usage)
        return self._chunk([CompletionChoice(index, "", finish_reason=reason)], usage)

    def last_chunks(self) -> bytes:
        """Write what follows when all answers have ended: the usage if it is asked for, and the stream's end."""
        usage = self._chunk([], self._usage()) if self._body.includes_usage else b""
        return usage + b"data: [DONE]\n\n"

    def error_chunk(self, error: ErrorObject) -> bytes:
        """Write an error in the midst of a stream, and its end."""
        return self._event(error) + b"data: [DONE]\n\n"

    def _chunk(self, choices: Sequence[CompletionChoice | ChunkChoice], usage: TokenUsage | None = None) -> bytes:
        kind = "chat.completion.chunk" if self._is_chat else "text_completion"
        return self._event(self._object(kind, choices, usage if self._body.includes_usage else UNSET))

    def _so_far(self, usage: Usage) -> TokenUsage | None:
        return _summed([usage], [usage]) if self._body.includes_usage_so_far else None

    def _event(self, content: Struct) -> bytes:
        return b"data: " + self._encoder.encode(content) + b"\n\n"

    # ---- A whole answer --------

    def take(self, index: int, event: TokenEvent | DoneEvent) -> None:
        """Keep what came for answer `index`."""
        choice = self._choices.setdefault(index, _Choice())
        if isinstance(event, DoneEvent):
            choice.done = event
        else:
            choice.text.append(event.text)
            if self._body.num_alternatives is not None:
                choice.tokens.append(event)

    def whole(self) -> bytes:
        """Write what was taken, once all answers have ended."""
        choices = [self._whole_choice(index, choice) for index, choice in sorted(self._choices.items())]
        kind = "chat.completion" if self._is_chat else "text_completion"
        return self._encoder.encode(self._object(kind, choices, self._usage()))

    def _whole_choice(self, index: int, choice: _Choice) -> CompletionChoice | ChatChoice:
        assert choice.done is not None
        text, reason = "".join(choice.text), choice.done.finish_reason
        logprobs = self._logprobs(choice, choice.tokens)
        if self._is_chat:
            return ChatChoice(index, ChatMessage(text), self._chat_logprobs(logprobs), reason)
        return CompletionChoice(index, text, self._completion_logprobs(logprobs), reason)

    def _object(
        self,
        kind: str,
        choices: Sequence[CompletionChoice | ChatChoice | ChunkChoice],
        usage: TokenUsage | UnsetType | None,
    ) -> Completion:
        return Completion(self._id, kind, self._created, self._model, self._fingerprint, choices, usage)

    def _usage(self) -> TokenUsage:
        ends = {index: choice.done.usage for index, choice in self._choices.items() if choice.done is not None}
        return _summed([usage for index, usage in ends.items() if index % self._body.n == 0], ends.values())

    # ---- Log-probabilities --------

    def _logprobs(self, choice: _Choice, events: Sequence[TokenEvent]) -> list[tuple[int, ChatLogprob]]:
        """Describe tokens, each with the place where it begins in the text of all tokens."""
        found = []
        for event in events:
            if event.logprobs is UNSET or self._body.num_alternatives is None:
                continue
            chosen = self._alternative(event.token_id, event.logprobs.logprob)
            top = event.logprobs.top[: self._body.num_alternatives]
            others = tuple(self._alternative(entry.token_id, entry.logprob) for entry in top)
            found.append((choice.num_characters, ChatLogprob(chosen.token, chosen.logprob, chosen.bytes, others)))
            choice.num_characters += len(chosen.token)
        return found

    def _alternative(self, token_id: int, logprob: float) -> Alternative:
        spelled = token_bytes(self._tokenizer, token_id)
        return Alternative(spelled.decode("utf-8", "replace"), max(logprob, -9999.0), tuple(spelled))

    def _chat_logprobs(self, found: Sequence[tuple[int, ChatLogprob]]) -> ChatLogprobs | None:
        return ChatLogprobs(tuple(token for _, token in found)) if self._body.num_alternatives is not None else None

    def _completion_logprobs(self, found: Sequence[tuple[int, ChatLogprob]]) -> CompletionLogprobs | None:
        if self._body.num_alternatives is None:
            return None
        top = [{other.token: other.logprob for other in token.top_logprobs} for _, token in found]
        return CompletionLogprobs(
            [token.token for _, token in found],
            [token.logprob for _, token in found],
            top if self._body.num_alternatives else None,
            [offset for offset, _ in found],
        )


def _summed(prompts: Collection[Usage], answers: Collection[Usage]) -> TokenUsage:
    """Add up prompts and answers, each told by the usages that count for it."""
    prompt = sum(usage.prompt_tokens for usage in prompts)
    completion = sum(usage.completion_tokens for usage in answers)
    cached = sum(usage.cached_tokens for usage in prompts)
    return TokenUsage(prompt, completion, prompt + completion, PromptDetails(cached))


class HttpError(Exception):
    """An answer that says what was wrong: status, object and headers."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
        self.object = ErrorObject(ErrorDetail(message, kind, param, code))
        self.headers = dict(headers or {})

    def body(self) -> bytes:
        """Return the object as JSON."""
        return msgspec.json.encode(self.object)

    @classmethod
    def of(cls, error: PDError, *, param: str | None = None, is_ending: bool = False) -> HttpError:
        """Say that a request failed; what an ending cluster refuses is no matter of load."""
        status = 503 if is_ending and error.code == "overloaded" else STATUS.get(error.code, 500)
        headers = {}
        if error.retry_after_s is not None:
            headers["retry-after"] = str(max(1, ceil(error.retry_after_s)))
        if status == 401:
            headers["www-authenticate"] = "Bearer"
        code = "service_unavailable" if status == 503 else _CODES.get(error.code, error.code)
        return cls(status, error.message, param=param, code=code, headers=headers)


def error_of(event: ErrorEvent) -> PDError:
    """Rebuild the error that an event tells of."""
    return error_for(event.code, event.message, None if event.retry_after_s is UNSET else event.retry_after_s)

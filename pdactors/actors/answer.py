"""`Answer`: one client's request at the gateway, from token ids to the events that its client reads. No I/O."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from pdactors.client_messages import (
    AnyEvent,
    DoneEvent,
    Logprob,
    LogprobEntry,
    RequestBody,
    RequestId,
    Timing,
    TokenEvent,
    Usage,
)
from pdactors.messages import DecodePart, FinishReason, Generate, PrefillPart, Token
from pdactors.text.detokenizer import Detokenizer
from pdactors.text.stops import StopMatcher
from pdactors.text.tokenizer import Tokenizer
from pdactors.token_ids import TokenIds

Sink = Callable[[AnyEvent], None]
NO_MOVE = DecodePart("none", 0.0, 0.0)  # of an answer that no other engine went on with


@dataclass
class Answer:
    """Puts the tokens of a request in order, drops what came twice, and turns them into text.

    Prefill and decode send on different connections, so the second token may arrive before the first. It owns how far
    the answer is: when an engine is lost, the next attempt begins after `token_ids`, and tokens of attempts before
    it are late. So what a client reads is of one piece, whatever was computed twice.
    """

    request: str  # our id, the same in every actor
    id: RequestId | None  # the client's
    body: RequestBody
    sink: Sink
    arrived_s: float
    ask: Generate | None = None  # what the router was asked, once it was
    attempt: int = 1
    prefill: PrefillPart | None = None
    decode: DecodePart | None = None
    first_s: float = 0.0
    last_s: float = 0.0
    token_ids: list[int] = field(default_factory=list)  # given out
    finish: FinishReason | None = None
    _early: dict[int, Token] = field(default_factory=dict)
    _text: Detokenizer | None = None
    _stops: StopMatcher | None = None

    def begin(self, tokenizer: Tokenizer, ask: Generate) -> None:
        """Get ready for tokens that follow the prompt of `ask`."""
        self.ask = ask
        self._text = Detokenizer(tokenizer, tuple(ask.prompt))
        stop = self.body.stop
        self._stops = StopMatcher((stop,) if isinstance(stop, str) else stop)

    def resume(self, attempt: int) -> TokenIds:
        """Take tokens of `attempt` only from now on, and return those that it goes on after."""
        self.attempt = attempt
        self._early.clear()
        return TokenIds.of(self.token_ids)

    def take(self, token: Token, tokenizer: Tokenizer, now: float) -> bool:
        """Take a token in and emit what can be said now; False if it is late or was there already.

        Sets `finish` once the answer has ended, by the engine's word or by a stop string.
        """
        is_late = token.attempt != self.attempt or token.index < self.num_tokens or self.finish is not None
        if is_late or token.index in self._early:
            return False
        self._early[token.index] = token
        while self.finish is None and self.num_tokens in self._early:
            self._emit(self._early.pop(self.num_tokens), tokenizer, now)
        return True

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.ask.prompt) if self.ask is not None else 0

    @property
    def prompt_use(self) -> tuple[int, int]:
        """The prompt's tokens, and how many of them were cached."""
        return self.num_prompt_tokens, self.prefill.cached_tokens if self.prefill else 0

    def done(self, finish: FinishReason, now: float) -> DoneEvent:
        """Describe the end."""
        prompt, cached = self.prompt_use
        how = self.decode or NO_MOVE
        usage = Usage(prompt, self.num_tokens, cached)
        return DoneEvent(
            self.id,
            finish,
            usage,
            self._timing(now),
            how.path,
            how.path_reason,
            how.codec,
            how.num_pruned,
            self.request,
        )

    def _emit(self, token: Token, tokenizer: Tokenizer, now: float) -> None:
        assert self._text is not None
        assert self._stops is not None
        self.prefill = self.prefill or token.prefill
        if token.decode is not None:
            self.decode = token.decode
        self.first_s = self.first_s or now
        self.last_s = now
        self.token_ids.append(token.token_id)
        text, is_stopped = self._stops.push(self._text.push(token.token_id))
        if is_stopped:
            self.finish = "stop"
        elif token.finish is not None:
            self.finish = token.finish
            rest, is_stopped = self._stops.push(self._text.flush())
            text += rest
            if is_stopped:
                self.finish = "stop"
            else:
                text += self._stops.flush()
        event = TokenEvent(self.id, token.index, token.token_id, text)
        if token.logprob is not None:
            top = tuple(LogprobEntry(t.token_id, tokenizer.decode([t.token_id]), t.logprob) for t in token.top)
            event = msgspec.structs.replace(event, logprobs=Logprob(token.logprob, top))
        if token.sampled_s is not None:
            event = msgspec.structs.replace(event, sampled_s=token.sampled_s)
        self.sink(event)

    def _timing(self, now: float) -> Timing:
        """Divide the time by our own clock: of another machine's only differences mean something."""
        prefill, decode = self.prefill, self.decode
        span_s = self.last_s - self.first_s
        prefill_s = prefill.end_s - prefill.begin_s if prefill else 0.0
        return Timing(
            queue_ms=_ms((self.first_s if prefill else now) - prefill_s - self.arrived_s),
            prefill_ms=_ms(prefill_s),
            migration_ms=_ms(decode.adopted_s - decode.sent_s) if decode else 0.0,
            ttft_ms=_ms(self.first_s - self.arrived_s) if self.num_tokens else 0.0,
            tpot_ms=_ms(span_s / (self.num_tokens - 1)) if self.num_tokens > 1 else 0.0,
            total_ms=_ms(now - self.arrived_s),
        )


def _ms(seconds: float) -> float:
    return round(max(0.0, seconds) * 1000, 3)

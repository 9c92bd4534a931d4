"""`Tracer`: what the gateway notes of its answers, and timelines of what all actors noted."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import msgspec

from pdactors.actors.answer import Answer
from pdactors.client_messages import DoneEvent
from pdactors.errors import BadRequest, PDError
from pdactors.observe.timeline import DONE, FAILED, RECEIVED, TOKENISED, Timeline, make_timeline
from pdactors.stamps import Detail, Stamps

if TYPE_CHECKING:
    from pdactors.actors.gateway import Gateway


class Tracer:
    """Keeps its notes in the gateway's trail, as other actors do in theirs."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._trail = gateway.trail
        self._counts = gateway.counts  # totals, for whoever wants rates

    # ---- Notes --------

    def received(self, answer: Answer) -> None:
        """A client's request came."""
        detail: dict[str, Detail] = {} if answer.id is None else {"id": answer.id}
        self._counts["requests"] += 1
        self._trail.note(answer.request, RECEIVED, answer.arrived_s, **detail)

    def tokenised(self, answer: Answer) -> None:
        """It goes to the router."""
        self._counts["prompt_tokens"] += answer.num_prompt_tokens
        self._trail.note(answer.request, TOKENISED, self._gateway.clock(), prompt_tokens=answer.num_prompt_tokens)

    def written(self, answer: Answer, count: int) -> None:
        """So many tokens were handed to the client's socket."""
        now = self._gateway.clock()
        self._counts["generated_tokens"] += count
        for _ in range(count):
            self._trail.written(answer.request, now)

    def done(self, answer: Answer, event: DoneEvent, now: float) -> None:
        """The answer ended."""
        how: dict[str, Detail] = {"end": event.finish_reason, "path": event.path, "codec": event.codec}
        how |= {"path_reason": event.path_reason} if event.path_reason else {}
        usage = msgspec.to_builtins(event.usage)
        self._trail.note(answer.request, DONE, now, **how, **usage, ttft_ms=event.timing.ttft_ms)

    def failed(self, answer: Answer, error: PDError) -> None:
        """The answer ended with an error."""
        self._counts["failed"] += 1
        self._trail.note(answer.request, FAILED, self._gateway.clock(), end=error.code, message=error.message)

    # ---- Answers --------

    async def timeline(self, given: str) -> Timeline:
        """Return the timeline of a request, named by our id or the client's; of the last one for "".

        Raises:
            BadRequest: it is not among the last ones.
            RequestTimeout: the router does not answer.
        """
        request = self._find(given)
        survey = await self._gateway.survey(request=request)
        now_s = self._gateway.clock()
        return make_timeline(request, survey.reports, survey.clocks, survey.silent, now_s, time.time())

    def recent(self, count: int) -> list[dict[str, Any]]:
        """Describe the last requests, the latest first."""
        latest = [*self._trail][: -count - 1 : -1]
        return [_summary(request, stamps) for request in latest if (stamps := self._trail.of(request)) is not None]

    def _find(self, given: str) -> str:
        if not self._gateway.spec.config.trace.requests:
            raise BadRequest("nothing is traced here: trace.requests is 0")
        known: list[str] = [*self._trail][::-1]
        if not known:
            raise BadRequest("there was no request yet")
        if not given:
            return known[0]
        if given in known:
            return given
        for request in known:
            stamps = self._trail.of(request)
            if stamps is not None and str(stamps.stamps[0].detail.get("id", "")) == given:
                return request
        raise BadRequest(f"request {given!r} is not among the last {len(known)} (trace.requests)")


def _summary(request: str, stamps: Stamps) -> dict[str, Any]:
    found: dict[str, Any] = {"request": request, "num_tokens": len(stamps.written_s)}
    for stamp in stamps.stamps:
        found |= stamp.detail
        if stamp.what == RECEIVED:
            found["received_s"] = stamp.at_s
        elif stamp.what in (DONE, FAILED):
            found["total_ms"] = round(1000 * (stamp.at_s - found["received_s"]), 1)
    return found

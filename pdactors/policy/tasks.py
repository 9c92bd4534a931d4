"""What engines and migrators are told to do for a request, in messages. Pure."""

from __future__ import annotations

from typing import NamedTuple

from pdactors.errors import InvariantError, PDError
from pdactors.messages import Decode, KVHandle, Message, Migrate, Prefill, Prefilled, Rejected
from pdactors.policy.requests import Request
from pdactors.token_ids import TokenIds


class Order(NamedTuple):
    """Send `message` to the actor called `to`."""

    to: str
    message: Message


def prefill(request: Request) -> Prefill:
    """Compute the prompt, with what others lend of it."""
    ask = request.ask
    return Prefill(
        ask.request,
        request.attempt,
        ask.prompt,
        ask.sampling,
        ask.priority,
        ask.save_final_kv,
        tuple(sorted(request.prefix, key=lambda segment: segment.start)),
        request.movers[-1] if request.planned else "",
        request.prefix_tokens,
        generated=request.generated,
    )


def migrate(request: Request, now: float) -> Migrate:
    """Bring the prompt's KV to the node of the last of `movers`."""
    ask = request.ask
    handle = _done(request).handle
    time_left_s = None if ask.deadline_s is None else ask.deadline_s - now
    digests = request.keys.full()
    return Migrate(ask.request, request.attempt, handle, request.movers[-1], digests, ask.priority, time_left_s)


def decode(request: Request, handle: KVHandle, now: float) -> Decode:
    """Go on with a sequence whose KV `handle` names."""
    ask, done = request.ask, _done(request)
    return Decode(
        request=ask.request,
        attempt=request.attempt,
        prompt=ask.prompt,
        generated=TokenIds.of([*request.generated, done.first_token]),
        sampling=ask.sampling,
        handle=handle,
        sent_s=done.sent_s,
        priority=ask.priority,
        save_final_kv=ask.save_final_kv,
        path=request.way.path,
        path_reason=request.way.why,
        waited_s=now - request.prefilled_s,
    )


def reject(request: Request, error: PDError) -> Rejected:
    """Tell the gateway why the request ends."""
    return Rejected(request.ask.request, error.code, error.message, error.retry_after_s)


def _done(request: Request) -> Prefilled:
    if request.prefilled is None:
        raise InvariantError(f"request {request.ask.request} is {request.stage} and was not prefilled")
    return request.prefilled

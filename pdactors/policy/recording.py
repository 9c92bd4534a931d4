"""What the router is told and what it orders, as lines that can be put to the policies again. Pure.

A recording's first line holds the `Limits`, each other one a `Stimulus`. A line is msgpack in base64.
"""

from __future__ import annotations

import base64
import inspect
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import msgspec
from msgspec import Struct

from pdactors.errors import BadRequest
from pdactors.messages import Control, Load, Member
from pdactors.policy.admission import Limits
from pdactors.policy.dispatch import Dispatcher
from pdactors.policy.tasks import Order
from pdactors.token_ids import from_wire, to_wire

STIMULI = (  # methods of the dispatcher, none of which calls another
    "joined lost migrator_ready cache_changed generate resume cancel pinned prefilled migrated stranded adopted "
    "finished failed undelivered tick"
).split()


class Stimulus(Struct, frozen=True, array_like=True):
    """One call of the dispatcher: its arguments, as far as it takes them, and the orders that came of it."""

    kind: str
    now: float = 0.0
    name: str = ""
    message: Control | None = None
    member: Member | None = None
    load: Load | None = None
    orders: tuple[tuple[str, Control], ...] = ()

    def put_to(self, dispatcher: Dispatcher) -> tuple[Order, ...]:
        """Call a dispatcher with it; returns what that orders.

        Raises:
            BadRequest: there is no such call.
        """
        if self.kind not in STIMULI:
            raise BadRequest(f"the router is never told {self.kind}")
        action = getattr(dispatcher, self.kind)
        return tuple(action(*(getattr(self, field) for field in _fields(action))) or ())


_encoder = msgspec.msgpack.Encoder(enc_hook=to_wire)
_decoder = msgspec.msgpack.Decoder(Stimulus, dec_hook=from_wire)
_limits_decoder = msgspec.msgpack.Decoder(Limits)


def record(dispatcher: Dispatcher, write: Callable[[bytes], object]) -> None:
    """Have the limits of a dispatcher written as a line, and each call of it from now on."""

    def recorded(kind: str) -> Callable[..., Any]:
        action = getattr(dispatcher, kind)
        fields = _fields(action)

        @wraps(action)
        def call(*arguments: Any) -> Any:
            orders = action(*arguments)
            write(_line(Stimulus(kind, orders=tuple(orders or ()), **dict(zip(fields, arguments, strict=True)))))
            return orders

        return call

    write(_line(dispatcher.limits))
    for kind in STIMULI:
        setattr(dispatcher, kind, recorded(kind))


def read(lines: Iterable[bytes]) -> tuple[Limits, list[Stimulus]]:
    """Read a recording.

    Raises:
        BadRequest: a line is not what is written.
    """
    try:
        first, *others = (base64.b64decode(line.strip(), validate=True) for line in lines)
        return _limits_decoder.decode(first), [_decoder.decode(data) for data in others]
    except (ValueError, msgspec.DecodeError) as error:
        raise BadRequest(f"no recording of a router: {error}") from error


def _line(value: object) -> bytes:
    return base64.b64encode(_encoder.encode(value)) + b"\n"


def _fields(action: Callable[..., object]) -> list[str]:
    """Return the fields of a Stimulus that hold the arguments of a call."""
    parameters = inspect.signature(action).parameters
    return [name if name in Stimulus.__struct_fields__ else _OTHERS[name] for name in parameters]


_OTHERS = {"ask": "message", "gateway": "name", "sender": "name"}

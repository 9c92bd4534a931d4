"""Every error that a user of pdactors can meet. Imports nothing.

PDError                 code "internal" unless a child says otherwise
|-- BadRequest          bad_request       the request is malformed or out of range
|   `-- PromptTooLong   prompt_too_long   more tokens than the model or the memory can hold
|-- Overloaded          overloaded        try again after `retry_after_s`
|-- Unauthorized        unauthorized      missing or wrong token
|-- WorkerLost          worker_lost       the actor that held the request died
|-- RequestTimeout      timeout           the request's deadline passed
|-- ConfigError         config            the cluster file, environment or --set is wrong
|-- ModelError          model             the model cannot be found, read or run
|-- ConnectionLost      connection        the peer went away or could not be reached
|-- Refused             refused           the cluster refused an actor that wanted to join
`-- InvariantError      invariant         our own accounting is broken; the actor stops
"""

from __future__ import annotations

from typing import ClassVar


class PDError(Exception):
    """Base of all errors; `code` is what travels on the wire."""

    code: ClassVar[str] = "internal"

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_s = retry_after_s


class BadRequest(PDError):
    code = "bad_request"


class PromptTooLong(BadRequest):
    code = "prompt_too_long"


class Overloaded(PDError):
    code = "overloaded"


class Unauthorized(PDError):
    code = "unauthorized"


class WorkerLost(PDError):
    code = "worker_lost"


class RequestTimeout(PDError):
    code = "timeout"


class ConfigError(PDError):
    code = "config"


class ModelError(PDError):
    code = "model"


class ConnectionLost(PDError):
    code = "connection"


class Refused(PDError):
    code = "refused"


class InvariantError(PDError):
    code = "invariant"


def error_for(code: str, message: str, retry_after_s: float | None = None) -> PDError:
    """Rebuild the error that `code` names; an unknown code gives a plain `PDError`."""
    kinds: dict[str, type[PDError]] = {PDError.code: PDError}
    for kind in _descendants(PDError):
        kinds.setdefault(kind.code, kind)
    return kinds.get(code, PDError)(message, retry_after_s=retry_after_s)


def _descendants(kind: type[PDError]) -> list[type[PDError]]:
    found = []
    for child in kind.__subclasses__():
        found += [child, *_descendants(child)]
    return found

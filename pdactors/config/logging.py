"""The log: structlog and the standard library's loggers, one stream, console on a terminal and JSON lines otherwise."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from typing import Any, TextIO, cast

import structlog
from structlog.typing import EventDict, FilteringBoundLogger, Processor, WrappedLogger

from pdactors.errors import ConfigError

LEVELS = ("debug", "info", "warning", "error", "critical")
SECRET_KEYS = frozenset({"token", "join_token", "secret", "password", "authorization"})
ERASE_LINE = "\r\x1b[2K"
_OURS = frozenset({"exception", "stack"})  # texts of several lines
_FOREIGN = ("transformers", "huggingface_hub")  # libraries that print to stderr by themselves


def configure(*, level: str = "info", stream: TextIO | None = None) -> None:
    """Send every log line to `stream` (stderr); PDACTORS_LOG_LEVEL wins over `level`. May be called again.

    Raises ConfigError for an unknown level.
    """
    number = _level_number(level)
    output = sys.stderr if stream is None else stream
    renderer = _renderer(output)
    structlog.configure(
        processors=[*_shared(), *renderer],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.WriteLoggerFactory(output),
        cache_logger_on_first_use=False,
    )
    handler = _Handler(output)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *renderer],
            foreign_pre_chain=[structlog.stdlib.add_logger_name, *_shared()],
        )
    )
    root = logging.getLogger()
    for old in [old for old in root.handlers if isinstance(old, _Handler)]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(max(number, logging.WARNING))  # other libraries' info is not ours to show
    logging.captureWarnings(True)
    for name in _FOREIGN:
        _adopt(name)


def get_logger(**bound: Any) -> FilteringBoundLogger:
    """A logger with `bound` in every line. Where nobody has configured structlog, warnings go to stderr, as the
    standard library's do: a client library must not write to its host's stdout."""
    if not structlog.is_configured():
        structlog.configure(
            processors=[*_shared(), *_renderer(sys.stderr)],
            wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
            logger_factory=lambda *_: structlog.WriteLogger(sys.stderr),
        )
    return cast(FilteringBoundLogger, structlog.get_logger(**bound))


def mask_secrets(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
    """A structlog processor: values of keys that name a secret become "***", at any depth."""
    return {key: _masked(key, value) for key, value in event.items()}


class _Handler(logging.StreamHandler[TextIO]):
    """Ours, so that the next `configure` finds and replaces it."""


class _Propagating(logging.Logger):
    """A library's root logger that leaves output to ours, whatever the library sets when it is imported later."""

    @property
    def propagate(self) -> bool:
        return True

    @propagate.setter
    def propagate(self, value: bool) -> None:
        pass

    def addHandler(self, hdlr: logging.Handler) -> None:
        pass


def _adopt(name: str) -> None:
    logger = logging.getLogger(name)
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
    logger.__class__ = _Propagating


def _level_number(level: str) -> int:
    chosen = os.environ.get("PDACTORS_LOG_LEVEL") or level
    if chosen.lower() not in LEVELS:
        origin = "environment variable PDACTORS_LOG_LEVEL" if os.environ.get("PDACTORS_LOG_LEVEL") else "log level"
        raise ConfigError(f'{origin}: "{chosen}" is not one of {", ".join(LEVELS)}')
    return logging.getLevelNamesMapping()[chosen.upper()]


def _shared() -> list[Processor]:
    return [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        mask_secrets,
    ]


def _renderer(stream: TextIO) -> list[Processor]:
    # Plain tracebacks: the rich ones print local variables, and with them secrets and prompts.
    if stream.isatty():
        lines = structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
        return [_printable, lines, cast(Processor, _on_top)]
    return [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(default=repr, ensure_ascii=False)]


def _printable(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
    """A processor: what clients sent must not move the cursor, or look like a line of its own."""
    return {
        key: repr(value) if isinstance(value, str) and key not in _OURS and not value.isprintable() else value
        for key, value in event.items()
    }


def _on_top(logger: WrappedLogger, method: str, line: str) -> str:
    """A processor: the line takes the place of a progress bar, of whatever process, which is drawn below it again."""
    return f"{ERASE_LINE}{line}"


def _masked(key: object, value: Any) -> Any:
    if value and isinstance(key, str) and key.lower() in SECRET_KEYS:
        return "***"
    if isinstance(value, Mapping):
        return {inner: _masked(inner, item) for inner, item in value.items()}
    if isinstance(value, list | tuple):
        return [_masked(None, item) for item in value]
    return value

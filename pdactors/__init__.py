"""pdactors: an actor-model, message-driven system that serves language models with prefill and decode separated."""

import importlib
from typing import TYPE_CHECKING, Any

from pdactors.version import VERSION as __version__

if TYPE_CHECKING:
    from pdactors.client import AsyncClient, Client, Cluster, Generation, launch
    from pdactors.errors import (
        BadRequest,
        ConfigError,
        ConnectionLost,
        ModelError,
        Overloaded,
        PDError,
        PromptTooLong,
        RequestTimeout,
        Unauthorized,
        WorkerLost,
    )

__all__ = [
    "AsyncClient",
    "BadRequest",
    "Client",
    "Cluster",
    "ConfigError",
    "ConnectionLost",
    "Generation",
    "ModelError",
    "Overloaded",
    "PDError",
    "PromptTooLong",
    "RequestTimeout",
    "Unauthorized",
    "WorkerLost",
    "__version__",
    "launch",
]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Import a name when it is first asked for: commands and actors, which are quick to start, need few of them."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        errors = importlib.import_module("pdactors.errors")
        home = errors if hasattr(errors, name) else importlib.import_module("pdactors.client")
        return getattr(home, name)

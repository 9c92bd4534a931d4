"""pdactors: an actor-model, message-driven system that serves language models with prefill and decode separated."""

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
from pdactors.version import VERSION as __version__

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

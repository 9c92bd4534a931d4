"""pdactors: an actor-model, message-driven system that serves language models with prefill and decode separated."""

from pdactors.version import VERSION as __version__

__all__ = ["__version__"]

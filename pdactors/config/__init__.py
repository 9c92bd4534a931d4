"""Every option with its default and range, where settings come from, and how the log is set up."""

from pdactors.config.check import validate
from pdactors.config.cluster import (
    ClusterConfig,
    ClusterSection,
    EngineSection,
    KVSection,
    ListenSection,
    Mode,
    ModelSection,
    NodeSection,
    RouterSection,
    SecuritySection,
)

__all__ = [
    "ClusterConfig",
    "ClusterSection",
    "EngineSection",
    "KVSection",
    "ListenSection",
    "Mode",
    "ModelSection",
    "NodeSection",
    "RouterSection",
    "SecuritySection",
    "validate",
]

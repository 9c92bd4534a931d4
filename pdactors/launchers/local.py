"""The local launcher: each machine's own `pdactors launch` starts the nodes that are on it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pdactors.actors import launch as share
from pdactors.actors.discovery import Ready
from pdactors.config.cluster import ClusterConfig
from pdactors.engine.store import progress_bar, resolve


def launch(
    config: ClusterConfig,
    *,
    node: str | None = None,
    ready_file: Path | None = None,
    on_ready: Callable[[Ready], None] = lambda _ready: None,
    lifeline: int | None = None,
) -> None:
    """Run this machine's share of the cluster, in this process and its children; see `Launcher`."""
    if node is not None:
        config.node_named(node)  # before a model is fetched
    with progress_bar() as progress:
        folder = resolve(config.model.path, fetch=True, progress=progress)
    share.launch(config, folder, node=node, ready_file=ready_file, on_ready=on_ready, lifeline=lifeline)

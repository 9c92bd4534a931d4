"""The contract that launchers share, and which of them a cluster file wants."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from pdactors.actors.discovery import Ready
from pdactors.config.cluster import ClusterConfig


class Launcher(Protocol):
    """Runs a cluster, from its start to its end.

    * A node that cannot be had, or cannot start, is an error, and nothing is left of the others. Nobody waits for room.
    * `on_ready` is called once, when every node that it starts is ready; the ready file is there from then to the end.
    * An actor that dies afterwards comes back, and so does a node that somebody else than its machine can start again.
    * SIGTERM, Ctrl-C, and the end of `lifeline`, a descriptor, drain the cluster; then it returns, and nothing is left.
    """

    def __call__(
        self,
        config: ClusterConfig,
        *,
        node: str | None = None,
        ready_file: Path | None = None,
        on_ready: Callable[[Ready], None] = lambda _ready: None,
        lifeline: int | None = None,
    ) -> None:
        """Run what `config` describes, or of that only `node`.

        Raises:
            PDError: what kept it from starting, or ended it without being asked to.
        """


def launcher_of(config: ClusterConfig) -> Launcher:
    """Return the launcher that `cluster.launcher` names."""
    if config.cluster.launcher == "ray":
        from pdactors.launchers.ray import launch

        return launch
    from pdactors.launchers.local import launch as launch_here

    return launch_here

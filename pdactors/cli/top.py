"""`pdactors top`."""

from __future__ import annotations

import time
from pathlib import Path

import click

from pdactors.cli.options import cluster_options, connect


@click.command("top", epilog="Example:  pdactors top --interval 0.5")
@cluster_options
@click.option("--interval", type=click.FloatRange(min=0.1), default=1.0, show_default=True, help="Seconds.")
@click.option("--once", is_flag=True, help="Show it once and leave.")
def command(zmq: str | None, ready_file: Path | None, token: str, interval: float, once: bool) -> None:
    """Watch every actor of a running cluster; Ctrl-C leaves."""
    from rich.console import Console
    from rich.live import Live

    from pdactors.cli.status import view

    console = Console()
    with connect(zmq, ready_file, token) as client:
        if once:
            console.print(view(client.status()))
            return
        try:
            with Live(view(client.status()), console=console, auto_refresh=False, screen=console.is_terminal) as live:
                while True:
                    time.sleep(interval)
                    live.update(view(client.status()), refresh=True)
        except KeyboardInterrupt:
            pass

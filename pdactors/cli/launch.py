"""`pdactors launch`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from pdactors.cli.conceal import conceal_environment
from pdactors.cli.options import config_options
from pdactors.config.load import load
from pdactors.config.logging import ERASE_LINE, configure

SHOW_CURSOR = "\x1b[?25h"


@click.command(
    "launch",
    epilog="Examples:  pdactors launch cluster.toml   |   pdactors launch --set node.0.decode=2 --set kv.memory=1GiB",
)
@config_options
@click.option("--node", metavar="NAME", help="Start this node of the file; else all whose host is this machine.")
@click.option("--ready-file", type=click.Path(path_type=Path, dir_okay=False), help="Write the addresses here as JSON.")
@click.option("--lifeline", type=int, hidden=True, help="End when this descriptor's other end is closed.")
def command(
    file: Path | None, sets: tuple[str, ...], node: str | None, ready_file: Path | None, lifeline: int | None
) -> None:
    """Start this machine's share of the cluster in FILE (defaults without one) and stay until it ends.

    With cluster.launcher = "ray" that is all of it, on the machines of a Ray cluster.

    Prints one `ready` line with the addresses. Ctrl-C or SIGTERM drains and leaves nothing behind.
    """
    from pdactors.actors.discovery import Ready
    from pdactors.launchers.contract import launcher_of

    configure()
    config = load(file, sets=sets)
    conceal_environment()
    launch = launcher_of(config)

    def on_ready(ready: Ready) -> None:
        addresses = {"run_id": ready.run_id, "tcp": ready.tcp, "zmq": ready.zmq, "http": ready.http}
        if sys.stderr.isatty():
            click.echo(ERASE_LINE, nl=False, err=True)  # of a bar
        click.echo(f"ready {json.dumps(addresses)}")

    try:
        launch(config, node=node, ready_file=ready_file, on_ready=on_ready, lifeline=lifeline)
    finally:
        if sys.stderr.isatty():
            click.echo(f"{ERASE_LINE}{SHOW_CURSOR}", nl=False, err=True)  # of a process that was killed with its bar

"""`pdactors drain`."""

from __future__ import annotations

import time
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pdactors.cli.options import cluster_options, connect

if TYPE_CHECKING:
    from pdactors.client import Client

POLL_S = 0.3


@click.command("drain", epilog="Example:  pdactors drain n0/decode-1")
@click.argument("actor")
@cluster_options
@click.option("--no-wait", is_flag=True, help="Return at once, not when the engine has stopped.")
def command(actor: str, zmq: str | None, ready_file: Path | None, token: str, no_wait: bool) -> None:
    """Give the engine ACTOR no new work, let it finish what it has, and stop it."""

    with connect(zmq, ready_file, token) as client:
        draining = client.drain(actor)["draining"]
        if not no_wait:
            settle(client, started=(), draining=draining)
    click.echo(f"{actor} {'is draining' if no_wait else 'is drained and stopped'}")


def settle(client: Client, *, started: Collection[str], draining: Collection[str]) -> None:
    """Wait until what was started is ready and what is draining has stopped."""
    while True:
        states = {actor["name"]: actor["state"] for actor in client.status()["actors"]}
        if all(states.get(name) == "ready" for name in started) and not any(name in states for name in draining):
            return
        time.sleep(POLL_S)

"""`pdactors scale`."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import click

from pdactors.cli.drain import settle
from pdactors.cli.options import cluster_options, connect
from pdactors.messages import Role

ROLES = ("prefill", "decode", "worker")


@click.command("scale", epilog="Example:  pdactors scale n0 decode=2")
@click.argument("node")
@click.argument("wanted", metavar="ROLE=COUNT")
@cluster_options
@click.option("--no-wait", is_flag=True, help="Return at once, not when the engines are ready or stopped.")
def command(node: str, wanted: str, zmq: str | None, ready_file: Path | None, token: str, no_wait: bool) -> None:
    """Start or drain engines until NODE has COUNT of ROLE (prefill, decode or worker)."""
    role, _, count = wanted.partition("=")
    if role not in ROLES or not count.isdecimal():
        raise click.UsageError(f"{wanted!r}: write ROLE=COUNT, the role being {', '.join(ROLES)}")
    with connect(zmq, ready_file, token) as client:
        outcome = client.scale(node, cast(Role, role), int(count))
        if not no_wait:
            settle(client, **outcome)
    for what, names in outcome.items():
        if names:
            click.echo(f"{what}: {', '.join(names)}")
    if not any(outcome.values()):
        click.echo(f"{node} has {count} {role} already")

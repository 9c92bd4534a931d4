"""`pdactors status`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from pdactors.cli.options import cluster_options, zmq_address


@click.command("status")
@cluster_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(zmq: str | None, ready_file: Path | None, token: str, as_json: bool) -> None:
    """Show every actor of a running cluster: role, state, process, work and KV blocks."""
    from pdactors.client import Client

    with Client(zmq_address(zmq, ready_file), token=token) as client:
        found = client.status()
    if as_json:
        click.echo(json.dumps(found))
    else:
        _show(found)


def _show(found: dict[str, Any]) -> None:
    """Print a table that fits 80 columns; the actors' names give way where it does not."""
    from rich.console import Console
    from rich.table import Table

    has_racks = len({actor["rack"] for actor in found["actors"]}) > 1
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("actor", overflow="fold")
    for column in ("state", "pid", "rack") if has_racks else ("state", "pid"):
        table.add_column(column, no_wrap=True)
    for column in ("run", "wait", "KV\nblocks", "free", "cached", "used", "lent\nout", "lent\nin", "step\nms"):
        table.add_column(column, justify="right", no_wrap=True)
    for actor in found["actors"]:
        kv, step = actor["kv_blocks"], actor["step_ms"]
        counts = [kv[name] for name in ("total", "free", "cached", "used", "leased_out", "leased_in")]
        table.add_row(
            actor["name"],
            actor["state"],
            str(actor["pid"]),
            *([actor["rack"]] if has_racks else []),
            str(actor["running"]),
            str(actor["waiting"]),
            *(str(count) if kv["total"] else "" for count in counts),
            f"{step['p50']:.1f}" if step["p50"] else "",
        )
    console = Console()
    console.print(f"run {found['run_id']}, {found['mode']}, model {found['model']}", highlight=False, soft_wrap=True)
    console.print(table)
    for name in found["silent"]:
        console.print(f"{name} did not answer", style="red")

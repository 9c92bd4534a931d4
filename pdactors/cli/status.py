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
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"run {found['run_id']}  {found['mode']}  {found['model']}", title_justify="left")
    for column in ("actor", "state", "pid"):
        table.add_column(column)
    for column in ("run", "wait", "KV total", "free", "cached", "used", "lent", "borrowed", "step p50 ms"):
        table.add_column(column, justify="right")
    for actor in found["actors"]:
        kv, step = actor["kv_blocks"], actor["step_ms"]
        counts = [kv[name] for name in ("total", "free", "cached", "used", "leased_out", "leased_in")]
        table.add_row(
            actor["name"],
            actor["state"],
            str(actor["pid"]),
            str(actor["running"]),
            str(actor["waiting"]),
            *(str(count) if kv["total"] else "" for count in counts),
            f"{step['p50']:.1f}" if step["p50"] else "",
        )
    console = Console()
    console.print(table)
    for name in found["silent"]:
        console.print(f"{name} did not answer", style="red")

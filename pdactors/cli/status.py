"""`pdactors status`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pdactors.cli.options import cluster_options, connect

if TYPE_CHECKING:
    from rich.console import Group


@click.command("status", epilog="Example:  pdactors status --json")
@cluster_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(zmq: str | None, ready_file: Path | None, token: str, as_json: bool) -> None:
    """Show every actor of a running cluster: role, state, process, work and KV blocks."""
    with connect(zmq, ready_file, token) as client:
        found = client.status()
    if as_json:
        click.echo(json.dumps(found))
    else:
        from rich.console import Console

        Console().print(view(found))


def view(found: dict[str, Any]) -> Group:
    """Lay the answer out for a terminal of 80 columns; the actors' names give way where it is narrower."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

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
    return Group(
        Text(f"run {found['run_id']}, {found['mode']}, model {found['model']}"),
        table,
        *(Text(_use(actor), style="dim") for actor in found["actors"] if actor["way"]),
        *(Text(f"{name} did not answer", style="red") for name in found["silent"]),
    )


def _use(actor: dict[str, Any]) -> str:
    """Say how an engine computes, and how much of the machine each phase uses."""
    parts = [
        f"{phase} {use['flops_share']:.0%} of FLOP/s, {use['bandwidth_share']:.0%} of bandwidth"
        for phase, use in actor["use"].items()
    ]
    return f"{actor['name']}: {'; '.join([actor['way'], *parts])}"

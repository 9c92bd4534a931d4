"""`pdactors leaks`."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import click

from pdactors.actors.accounts import is_clean
from pdactors.actors.discovery import running
from pdactors.actors.ready_file import stale_ready_files
from pdactors.actors.remains import orphans
from pdactors.cli.options import cluster_options, connect

SECOND_LOOK_S = 1.0  # what is on its way to be let go is gone by then


@click.command("leaks", epilog="Example:  pdactors leaks --ready-file ready.json")
@cluster_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(zmq: str | None, ready_file: Path | None, token: str, as_json: bool) -> None:
    """Look for KV held for nobody in the running cluster, and for what dead runs left; exit 1 if there is any.

    Work in flight is not a leak. Without a running cluster only processes and ready files are looked for.
    """
    found: dict[str, Any] = {"leases": [], "blocks_unaccounted": 0, "stale_segments": []}
    if zmq or ready_file or running():
        with connect(zmq, ready_file, token) as client:
            found = client.leaks()
            if not is_clean(found):
                time.sleep(SECOND_LOOK_S)
                found = client.leaks()
    found["stale_processes"] = [
        {"pid": process.pid, "command": " ".join(process.cmdline()[1:])} for process in orphans()
    ]
    found["stale_files"] = [record.path for record in stale_ready_files()]
    if as_json:
        click.echo(json.dumps(found))
    elif is_clean(found):
        click.echo("nothing is held for nobody")
    else:
        for what, items in found.items():
            for item in items if isinstance(items, list) else [items] if items else []:
                click.echo(f"{what}: {item}")
    sys.exit(0 if is_clean(found) else 1)

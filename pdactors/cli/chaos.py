"""`pdactors chaos`."""

from __future__ import annotations

import secrets
import sys
from pathlib import Path

import click

from pdactors.cli.options import config_options


@click.command("chaos", epilog="Example:  pdactors chaos cluster.toml --minutes 2 --seed 7")
@config_options
@click.option("--minutes", type=click.FloatRange(min=0.05), default=2.0, show_default=True, help="How long.")
@click.option("--seed", type=click.IntRange(min=0), help="Of what is asked and what is done.  [default: by lot]")
@click.option("--concurrency", type=click.IntRange(1, 1024), default=16, show_default=True, help="Requests in flight.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    file: Path | None, sets: tuple[str, ...], minutes: float, seed: int | None, concurrency: int, as_json: bool
) -> None:
    """Start the cluster of FILE and hurt its actors while it answers: kill, stop, pause, restart, drain, cut off.

    What each request is answered alone is learnt first. Exits 1 if anything was wrong, hung or leaked.
    """
    from pdactors.bench.chaos import chaos
    from pdactors.engine.store import progress_bar

    seed = secrets.randbelow(1_000_000) if seed is None else seed
    click.echo(f"seed {seed}", err=True)
    with progress_bar() as progress:
        found = chaos(file, sets=sets, minutes=minutes, seed=seed, concurrency=concurrency, progress=progress)
    if as_json:
        import msgspec

        click.echo(msgspec.json.encode(found))
    else:
        counts = ("right", "left", "clear_errors", "wrong", "hung", "leaked")
        said = ", ".join(f"{getattr(found, name)} {name.replace('_', ' ')}" for name in counts)
        click.echo(f"{found.requests} requests: {said}; {len(found.events)} events")
        for fault in found.faults:
            click.echo(f"  {fault}")
    sys.exit(0 if found.is_good else 1)

"""`pdactors bench`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from pdactors.cli.options import config_options

if TYPE_CHECKING:
    from pdactors.bench.kv import KVBench


@click.group("bench")
def command() -> None:
    """Measure on this machine, each figure beside its reference in the same run."""


@command.command("kv", epilog="Example:  pdactors bench kv --rounds 10")
@config_options
@click.option(
    "--rounds", type=click.IntRange(1, 10_000), default=30, show_default=True, help="Hand-overs of each length."
)
@click.option("--seed", type=int, default=1, show_default=True, help="Of the prompts.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def kv(file: Path | None, sets: tuple[str, ...], rounds: int, seed: int, as_json: bool) -> None:
    """Start the cluster of FILE and time how KV gets from prefill to decode, short and long prompts in turn."""
    import msgspec

    from pdactors.bench.kv import bench_kv
    from pdactors.engine.store import progress_bar

    with progress_bar() as progress:
        found = bench_kv(file, sets=sets, rounds=rounds, seed=seed, progress=progress)
    if as_json:
        click.echo(msgspec.json.encode(found))
    else:
        _show(found)


def _show(found: KVBench) -> None:
    from rich.console import Console
    from rich.table import Table

    title = f"{found.model} {found.dtype}, blocks of {found.block_tokens} tokens; medians of {found.rounds} hand-overs"
    table = Table(title=title, title_justify="left")
    table.add_column("path")
    for column in ("tokens", "hand-over us", "p90 us", "bytes copied"):
        table.add_column(column, justify="right")
    for name, path in found.paths.items():
        for length, us in path.us_per_handover.items():
            table.add_row(name, length, f"{us:,.0f}", f"{path.p90_us[length]:,.0f}", f"{path.bytes_copied[length]:,}")
    console = Console()
    console.print(table)
    for name, path in found.paths.items():
        console.print(
            f"{name}: {path.difference_us:,.0f} us more for the longest; its KV changed hands at {path.gb_s:.1f} GB/s, "
            f"{path.ratio:.1f} times memcpy ({path.limit_gb_s:.1f} GB/s)"
        )
    for what, copy in found.memcpy.items():
        console.print(f"memcpy of one {what}: {copy.size_bytes:,} bytes in {copy.us:,.0f} us, {copy.gb_s:.1f} GB/s")

"""`pdactors bench`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from pdactors.cli.bench_router import router
from pdactors.cli.bench_serve import serve
from pdactors.cli.options import config_options

if TYPE_CHECKING:
    from pdactors.bench.engine import DecodeCost, EngineBench, PrefillCost
    from pdactors.bench.kv import KVBench, Part
    from pdactors.engine.shape import ModelDtype


@click.group("bench")
def command() -> None:
    """Measure on this machine, each figure beside its reference in the same run."""


command.add_command(router)
command.add_command(serve)


@command.command("kv", epilog="Example:  pdactors bench kv --rounds 10")
@config_options
@click.option(
    "--rounds", type=click.IntRange(1, 10_000), default=30, show_default=True, help="Hand-overs of each length."
)
@click.option("--seed", type=int, default=1, show_default=True, help="Of the prompts.")
@click.option(
    "--only",
    multiple=True,
    type=click.Choice(["lease", "ucx", "codecs", "prune"]),
    help="Measure this part; may be repeated.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def kv(file: Path | None, sets: tuple[str, ...], rounds: int, seed: int, only: tuple[Part, ...], as_json: bool) -> None:
    """Start the cluster of FILE and time how KV gets from prefill to decode, short and long prompts in turn.

    By lease and by UCX, each beside its limit; what the codecs cost and lose; and what the model still knows of a
    prompt whose KV was pruned.
    """
    import msgspec

    from pdactors.bench.kv import PARTS, bench_kv
    from pdactors.engine.store import progress_bar

    with progress_bar() as progress:
        found = bench_kv(file, sets=sets, parts=only or PARTS, rounds=rounds, seed=seed, progress=progress)
    if as_json:
        click.echo(msgspec.json.encode(found))
    else:
        _show(found)


@command.command("engine", epilog="Example:  pdactors bench engine --threads 2")
@click.option("--model", default="smollm2-135m", show_default=True, help="As model.path of a cluster file.")
@click.option("--dtype", type=click.Choice(["bfloat16", "float32"]), default="bfloat16", show_default=True)
@click.option("--threads", type=click.IntRange(1, 1024), default=1, show_default=True, help="Compute threads.")
@click.option("--rounds", type=click.IntRange(1, 1000), default=9, show_default=True, help="Steps of each kind.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def engine(model: str, dtype: ModelDtype, threads: int, rounds: int, as_json: bool) -> None:
    """Time decode steps and prompts in one process, in turns with transformers and with the machine's limits."""
    import msgspec

    from pdactors.bench.engine import bench_engine
    from pdactors.engine.store import progress_bar

    with progress_bar() as progress:
        found = bench_engine(model, dtype=dtype, threads=threads, rounds=rounds, progress=progress)
    if as_json:
        click.echo(msgspec.json.encode(found))
    else:
        _show_engine(found)


def _show_engine(found: EngineBench) -> None:
    from rich.console import Console
    from rich.table import Table

    title = (
        f"{found.model} {found.dtype} ({found.way}), {found.threads} threads; medians of {found.rounds} rounds; "
        f"this machine reads {found.read_gb_s} GB/s and multiplies {found.gemm_tflop_s} TFLOP/s"
    )
    table = Table(title=title, title_justify="left")
    for column in ("step", "ms", "attention ms", "transformers ms", "times", "limit ms", "of the limit"):
        table.add_column(column, justify="right" if column != "step" else "left")
    costs: list[tuple[str, DecodeCost | PrefillCost]]
    costs = [(f"decode, batch {cost.batch}, context {cost.context}", cost) for cost in found.decode]
    costs += [(f"prefill, {cost.tokens} tokens", cost) for cost in found.prefill]
    for name, cost in costs:
        faster, over = cost.transformers_ms / cost.ms, cost.ms / cost.limit_ms
        times = f"{cost.ms:.1f}", f"{cost.attention_ms:.1f}", f"{cost.transformers_ms:.1f}", f"{faster:.2f}"
        table.add_row(name, *times, f"{cost.limit_ms:.1f}", f"{over:.2f}")
    console = Console()
    console.print(table)
    console.print(f"attention reads KV at {found.attention_read_ratio:.2f} of the machine's rate")


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
        limit = "memcpy" if name == "lease" else "a raw socket"
        more = f"{path.difference_us:,.0f} us more for the longest; " if path.us_per_handover else ""
        cpu = f"; {path.cpu_ratio:.2f} of its CPU time, idle {path.idle_cpu:.2%} of a core" if path.cpu_ratio else ""
        console.print(
            f"{name}: {more}{path.gb_s:.2f} GB/s, {path.ratio:.2f} of {limit} ({path.limit_gb_s:.2f} GB/s){cpu}"
        )
    for codec, result in found.codecs.items():
        speed = f"{result.quantise_gb_s} / {result.dequantise_gb_s} GB/s, " if result.quantise_gb_s else ""
        console.print(f"{codec}: {result.ratio:.3f} of the size, {speed}top-1 {result.top1:.4f}, KL {result.kl:.2e}")
    if found.prune is not None:
        for length, at in found.prune.lengths.items():
            console.print(
                f"{found.prune.share} of a prompt of {length} tokens: {at.both} of the {at.whole} questions that are "
                f"answered after all of it, of {found.prune.questions}; pruning takes {at.prune_ms:.0f} ms"
            )
    for what, copy in found.memcpy.items():
        console.print(f"memcpy of one {what}: {copy.size_bytes:,} bytes in {copy.us:,.0f} us, {copy.gb_s:.1f} GB/s")

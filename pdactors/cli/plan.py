"""`pdactors plan`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click
import msgspec

from pdactors.cli.options import parse_modes
from pdactors.cli.traffic import WORKLOADS, kind_of, objective
from pdactors.config.cluster import Mode

if TYPE_CHECKING:
    from pdactors.bench.figures import Objective
    from pdactors.bench.workload import Kind
    from pdactors.sim.plan import PlanResult


def _widths(_ctx: click.Context, _option: click.Parameter, text: str) -> tuple[int, ...]:
    try:
        widths = tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise click.BadParameter(f"{text!r}: write numbers of devices, as in 1,2,4") from None
    if any(not 1 <= width <= 64 for width in widths):
        raise click.BadParameter(f"{text!r}: 1 to 64 devices an engine")
    return widths


@click.command(
    "plan",
    epilog="Example:  pdactors plan --model llama-3-8b --hardware a100-80g --lengths 1000:200 --rate 10 "
    "--slo ttft_ms=300,tpot_ms=15",
)
@click.option("--model", required=True, help="llama-3-8b, llama-3-70b, ..., a folder or config.json of Hugging Face.")
@click.option("--hardware", required=True, help="a100-80g, h100, h200 or cpu.")
@click.option("--dtype", type=click.Choice(["bfloat16", "float16", "float32"]), default="bfloat16", show_default=True)
@click.option("--workload", type=click.Choice(WORKLOADS), help="What is asked.  [default: mixed]")
@click.option("--lengths", callback=kind_of, default="", metavar="PROMPT:ANSWER", help="Or tokens of each request.")
@click.option("--rate", type=click.FloatRange(0, min_open=True), required=True, help="Requests a second, Poisson.")
@click.option("--slo", callback=objective, default="", metavar="ttft_ms=2000,tpot_ms=150", help="The objective.")
@click.option("--modes", callback=parse_modes, default="", metavar="MODE,...", help="Modes to try.  [default: all]")
@click.option("--tp", "widths", callback=_widths, default="", metavar="N,...", help="Devices of an engine to try.")
@click.option("--max-devices", type=click.IntRange(1, 4096), default=64, show_default=True)
@click.option("--seed", type=int, default=1, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("-o", "--output", type=click.Path(path_type=Path, dir_okay=False), help="Write a report in HTML.")
def command(
    model: str,
    hardware: str,
    dtype: Literal["bfloat16", "float16", "float32"],
    workload: str | None,
    lengths: Kind | None,
    rate: float,
    slo: Objective,
    modes: tuple[Mode, ...],
    widths: tuple[int, ...],
    max_devices: int,
    seed: int,
    as_json: bool,
    output: Path | None,
) -> None:
    """Find the cheapest cluster that holds a rate within an objective: mode, engines of each role, chunks, batches.

    Candidates are simulated with the real policies. Exit status 1 if none that was tried holds the rate.
    """
    if workload and lengths:
        raise click.UsageError("--workload and --lengths exclude each other")
    from pdactors.bench.report import check_plots
    from pdactors.bench.workload import WORKLOADS as MIXES
    from pdactors.engine.store import progress_bar
    from pdactors.sim.hardware import find_hardware
    from pdactors.sim.plan import MODES, Planner
    from pdactors.sim.plan_report import make_report
    from pdactors.sim.shapes import ModelSize

    if output is not None:
        check_plots()
    name = workload or "mixed"
    planner = Planner(
        ModelSize.find(model),
        dtype,
        find_hardware(hardware),
        (lengths,) if lengths else MIXES[name],
        lengths.name if lengths else name,
        rate,
        slo,
        max_devices=max_devices,
        widths=widths,
        modes=modes or MODES,
        seed=seed,
    )
    with progress_bar() as progress:
        found = planner.plan(progress)
    if output is not None:
        output.write_text(make_report(found), "utf-8")
    if as_json:
        click.echo(msgspec.json.encode(found))
    else:
        _show(found)
    if found.best is None:
        raise SystemExit(1)


def _show(found: PlanResult) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    from pdactors.sim.plan_report import COLUMNS, candidates, rows, words

    console = Console()
    title = f"{found.model} on {found.hardware}; {found.tried} simulations"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in COLUMNS:
        table.add_column(column)
    for row in rows(found):
        table.add_row(*row)
    console.print(table)
    for candidate in candidates(found):
        console.print(f"{candidate.cluster.words}: {candidate.limit}", markup=False, highlight=False)
    for ratio in found.ratios:
        console.print(
            f"{ratio.prefill} prefill : {ratio.decode} decode: {ratio.max_rate:g}/s, {ratio.per_device:g} a device",
            highlight=False,
        )
    console.print(words(found), markup=False, highlight=False)

"""What the commands share that put a load to something: its options, and how its measurement is shown."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
import msgspec

from pdactors.cli.options import FILE, parse_modes

if TYPE_CHECKING:
    from pdactors.bench.figures import Objective
    from pdactors.bench.results import Load, ServeBench
    from pdactors.bench.serve import Outcome, Traffic
    from pdactors.bench.workload import Kind

F = TypeVar("F", bound=Callable[..., Any])

WORKLOADS = ("chat", "long", "thinking", "mixed")  # of bench/workload.py, which is imported when it is used
DEFAULT_SECONDS = 60.0


def objective(_ctx: click.Context, _option: click.Parameter, text: str) -> Objective:
    """Read `ttft_ms=2000,tpot_ms=150,share=0.95`; what is left out keeps its default."""
    from pdactors.bench.figures import Objective

    values: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if key not in Objective.__struct_fields__ or not equals:
            raise click.BadParameter(f"{part!r} is none of ttft_ms=MS, tpot_ms=MS and share=SHARE")
        try:
            values[key] = float(value)
        except ValueError:
            raise click.BadParameter(f"{part!r}: {value!r} is no number") from None
        if not 0 < values[key] < float("inf") or (key == "share" and values[key] > 1):
            raise click.BadParameter(f"{part!r}: must be above 0{', at most 1' if key == 'share' else ''}")
    return Objective(**values)


def kind_of(_ctx: click.Context, _option: click.Parameter, text: str) -> Kind | None:
    """Read `--lengths`; None if it was left out."""
    from pdactors.bench.workload import lengths

    try:
        return lengths(text) if text else None
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


_OPTIONS = (
    click.option("--workload", type=click.Choice(WORKLOADS), help="What is asked.  [default: mixed]"),
    click.option(
        "--lengths",
        callback=kind_of,
        default="",
        metavar="PROMPT:ANSWER",
        help="Tokens of each request, instead of a workload: 1000:200 or 64-499:2000-10000.",
    ),
    click.option("--trace", type=FILE, help="Ask what a trace in Mooncake's JSONL form has, instead."),
    click.option("--scale", type=click.FloatRange(1, 512), help="Divides the trace's lengths.  [default: 1]"),
    click.option(
        "--rate",
        type=click.FloatRange(0, min_open=True),
        help="Requests a second, Poisson.  [default: 1, or the trace's times]",
    ),
    click.option("--concurrency", type=click.IntRange(1, 4096), help="Requests in flight, instead of a rate."),
    click.option("--find-max-rate", is_flag=True, help="Look for the highest rate that meets the objective, instead."),
    click.option("--slo", callback=objective, default="", metavar="ttft_ms=2000,tpot_ms=150", help="The objective."),
    click.option("--seconds", type=click.FloatRange(0, min_open=True), help="Of arrivals, of each run.  [default: 60]"),
    click.option("--requests", type=click.IntRange(min=1), help="Of each run, instead of seconds."),
    click.option("--rounds", type=click.IntRange(1, 1000), default=1, show_default=True, help="The modes take turns."),
    click.option("--seed", type=int, default=1, show_default=True, help="Of the requests and their arrivals."),
)


def traffic_options(function: F) -> F:
    """Add the options that say what is asked, how often, and what counts as in time."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


def modes_option(help: str) -> Callable[[F], F]:
    """Add `--modes`, a list of them."""
    return click.option("--modes", callback=parse_modes, metavar="MODE,...", default="", help=help)


def result_options(function: F) -> F:
    """Add the options that say how a measurement is given out."""
    function = click.option(
        "-o", "--output", type=click.Path(path_type=Path, dir_okay=False), help="Write a report in HTML."
    )(function)
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")(function)


def put_out(found: Outcome, *, as_json: bool, output: Path | None) -> None:
    """Write the report that was asked for, and print the measurement."""
    if output is not None:
        from pdactors.bench.report import make_report

        output.write_text(make_report(found.bench, found.records), "utf-8")
    if as_json:
        click.echo(msgspec.json.encode(found.bench))
    else:
        show_measurement(found.bench)


def traffic_of(options: dict[str, Any]) -> Traffic:
    """Make the load that the options describe; raises UsageError where they contradict each other."""
    from pdactors.bench.serve import Traffic

    for names in (("workload", "lengths", "trace"), ("rate", "concurrency", "find_max_rate"), ("seconds", "requests")):
        given = [f"--{name.replace('_', '-')}" for name in names if options[name]]
        if len(given) > 1:
            raise click.UsageError(f"{' and '.join(given)} exclude each other")
    if options["scale"] and not options["trace"]:
        raise click.UsageError("--scale needs --trace")
    return Traffic(
        load=_load_of(options),
        workload=options["workload"] or "mixed",
        trace=options["trace"],
        scale=options["scale"] or 1.0,
        objective=options["slo"],
        rounds=options["rounds"],
        seed=options["seed"],
        kind=options["lengths"],
    )


def _load_of(options: dict[str, Any]) -> Load:
    """Fill in what was left out: one request a second for a minute, or the trace at its own times."""
    from pdactors.bench.results import Load

    rate, seconds = options["rate"], options["seconds"]
    if not (rate or options["concurrency"] or options["find_max_rate"] or options["trace"]):
        rate = 1.0
    if seconds is None and options["requests"] is None:
        seconds = DEFAULT_SECONDS
    return Load(rate, options["concurrency"], options["find_max_rate"], seconds, options["requests"])


def show_measurement(bench: ServeBench) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    from pdactors.bench.table import COLUMNS, LEGEND, load_words, notes, rows

    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), caption=LEGEND, caption_justify="left")
    for column in COLUMNS:
        table.add_column(column, justify="left" if column in ("server", "kind") else "right")
    for row in rows(bench):
        table.add_row(*row)
    console = Console()
    console.print(f"{bench.model} {bench.dtype} on {bench.place}; {load_words(bench)}", highlight=False)
    console.print(table)
    for note in notes(bench):
        console.print(note, markup=False, highlight=False)
    console.print(bench.verdict, markup=False, highlight=False)

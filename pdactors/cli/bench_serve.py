"""`pdactors bench serve`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from pdactors.cli.options import FILE, config_options, parse_modes
from pdactors.config.cluster import Mode

if TYPE_CHECKING:
    from pdactors.bench.figures import Objective
    from pdactors.bench.results import Load, ServeBench

WORKLOADS = ("chat", "long", "thinking", "mixed")  # of bench/workload.py, which is imported when it is used
DEFAULT_SECONDS = 60.0


def _objective(_ctx: click.Context, _option: click.Parameter, text: str) -> Objective:
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


@click.command("serve", epilog="Example:  pdactors bench serve --workload mixed --rate 2 --rounds 3 -o report.html")
@config_options
@click.option(
    "--modes",
    callback=parse_modes,
    metavar="MODE,...",
    default="",
    help="Modes to start.  [default: colocated,chunked,disaggregated,kvstore]",
)
@click.option("--workload", type=click.Choice(WORKLOADS), help="What is asked.  [default: mixed]")
@click.option("--trace", type=FILE, help="Ask what a trace in Mooncake's JSONL form has, instead.")
@click.option("--scale", type=click.FloatRange(1, 512), help="Divides the trace's lengths.  [default: 1]")
@click.option(
    "--rate",
    type=click.FloatRange(0, min_open=True),
    help="Requests a second, Poisson.  [default: 1, or the trace's times]",
)
@click.option("--concurrency", type=click.IntRange(1, 4096), help="Requests in flight, instead of a rate.")
@click.option("--find-max-rate", is_flag=True, help="Look for the highest rate that meets the objective, instead.")
@click.option("--slo", callback=_objective, default="", metavar="ttft_ms=2000,tpot_ms=150", help="The objective.")
@click.option("--seconds", type=click.FloatRange(0, min_open=True), help="Of arrivals, of each run.  [default: 60]")
@click.option("--requests", type=click.IntRange(min=1), help="Of each run, instead of seconds.")
@click.option("--rounds", type=click.IntRange(1, 1000), default=1, show_default=True, help="The modes take turns.")
@click.option("--seed", type=int, default=1, show_default=True, help="Of the requests and their arrivals.")
@click.option(
    "--url", "urls", multiple=True, help="Ask this OpenAI-compatible server and start no cluster; repeatable."
)
@click.option("--model-name", default="", help="What the server at --url calls its model.  [default: it is asked]")
@click.option("--api-key", default="", help="For the server at --url.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("-o", "--output", type=click.Path(path_type=Path, dir_okay=False), help="Write a report in HTML.")
def serve(
    file: Path | None,
    sets: tuple[str, ...],
    modes: tuple[Mode, ...],
    urls: tuple[str, ...],
    as_json: bool,
    output: Path | None,
    **options: Any,
) -> None:
    """Start the cluster of FILE in each mode on the same cores, and measure how the same requests are served.

    The requests are made up: 'chat' (about 128 tokens in, 64 out), 'long' (2,000 in, 16 out), 'thinking' (under 500 in,
    about 512 out), or 'mixed' (80% chats, 20% long ones). The objective holds a rate when 95% of the requests meet it,
    or the 'share' that --slo says.
    """
    _check(file, modes, urls, sets, options)
    from pdactors.bench.report import check_plots, make_report
    from pdactors.bench.serve import Traffic, bench_serve
    from pdactors.engine.store import progress_bar

    if output is not None:
        check_plots()  # before the work, not after it
    traffic = Traffic(
        load=_load(options),
        workload=options["workload"] or "mixed",
        trace=options["trace"],
        scale=options["scale"] or 1.0,
        objective=options["slo"],
        rounds=options["rounds"],
        seed=options["seed"],
    )
    peer = {"urls": urls, "model_name": options["model_name"], "api_key": options["api_key"]}
    with progress_bar() as progress:
        found = bench_serve(file, traffic, sets=sets, modes=modes, progress=progress, **peer)
    if output is not None:
        output.write_text(make_report(found.bench, found.records), "utf-8")
    if as_json:
        click.echo(msgspec.json.encode(found.bench))
    else:
        _show(found.bench)
    measured = [result for result in found.bench.servers.values() if result.error is None]
    if len(measured) < len(found.bench.servers):
        raise SystemExit(1)


def _check(
    file: Path | None, modes: tuple[Mode, ...], urls: tuple[str, ...], sets: tuple[str, ...], options: dict[str, Any]
) -> None:
    """Refuse options that contradict each other."""
    alternatives = (
        ("workload", "trace"),
        ("rate", "concurrency", "find_max_rate"),
        ("seconds", "requests"),
    )
    for names in alternatives:
        given = [f"--{name.replace('_', '-')}" for name in names if options[name]]
        if len(given) > 1:
            raise click.UsageError(f"{' and '.join(given)} exclude each other")
    if options["scale"] and not options["trace"]:
        raise click.UsageError("--scale needs --trace")
    if urls and modes:
        raise click.UsageError("--url and --modes exclude each other: with --url no cluster is started")
    if not urls and (options["model_name"] or options["api_key"]):
        raise click.UsageError("--model-name and --api-key need --url")
    if any(argument.partition("=")[0].strip() == "cluster.mode" for argument in sets):
        raise click.UsageError("--set cluster.mode: use --modes")


def _load(options: dict[str, Any]) -> Load:
    """Fill in what was left out: one request a second for a minute, or the trace at its own times."""
    from pdactors.bench.results import Load

    rate, seconds = options["rate"], options["seconds"]
    if not (rate or options["concurrency"] or options["find_max_rate"] or options["trace"]):
        rate = 1.0
    if seconds is None and options["requests"] is None:
        seconds = DEFAULT_SECONDS
    return Load(rate, options["concurrency"], options["find_max_rate"], seconds, options["requests"])


def _show(bench: ServeBench) -> None:
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
    console.print(f"{bench.model} {bench.dtype} on {bench.cores} cores; {load_words(bench)}", highlight=False)
    console.print(table)
    for note in notes(bench):
        console.print(note, markup=False, highlight=False)
    console.print(bench.verdict, markup=False, highlight=False)

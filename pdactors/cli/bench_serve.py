"""`pdactors bench serve`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import msgspec

from pdactors.cli.options import config_options, parse_modes
from pdactors.cli.traffic import show_measurement, traffic_of, traffic_options
from pdactors.config.cluster import Mode


@click.command("serve", epilog="Example:  pdactors bench serve --workload mixed --rate 2 --rounds 3 -o report.html")
@config_options
@click.option(
    "--modes",
    callback=parse_modes,
    metavar="MODE,...",
    default="",
    help="Modes to start.  [default: colocated,chunked,disaggregated,kvstore]",
)
@traffic_options
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
    _check(urls, modes, sets, options)
    traffic = traffic_of(options)
    from pdactors.bench.report import check_plots, make_report
    from pdactors.bench.serve import bench_serve
    from pdactors.engine.store import progress_bar

    if output is not None:
        check_plots()  # before the work, not after it
    peer = {"urls": urls, "model_name": options["model_name"], "api_key": options["api_key"]}
    with progress_bar() as progress:
        found = bench_serve(file, traffic, sets=sets, modes=modes, progress=progress, **peer)
    if output is not None:
        output.write_text(make_report(found.bench, found.records), "utf-8")
    if as_json:
        click.echo(msgspec.json.encode(found.bench))
    else:
        show_measurement(found.bench)
    measured = [result for result in found.bench.servers.values() if result.error is None]
    if len(measured) < len(found.bench.servers):
        raise SystemExit(1)


def _check(urls: tuple[str, ...], modes: tuple[Mode, ...], sets: tuple[str, ...], options: dict[str, Any]) -> None:
    """Refuse options that contradict each other."""
    if urls and modes:
        raise click.UsageError("--url and --modes exclude each other: with --url no cluster is started")
    if not urls and (options["model_name"] or options["api_key"]):
        raise click.UsageError("--model-name and --api-key need --url")
    if any(argument.partition("=")[0].strip() == "cluster.mode" for argument in sets):
        raise click.UsageError("--set cluster.mode: use --modes")

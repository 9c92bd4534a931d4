"""`pdactors trace`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from pdactors.cli.options import cluster_options, connect

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

    from pdactors.observe.timeline import Timeline

FORMS = (".html", ".json")


@click.command("trace", epilog="Example:  pdactors trace -o timeline.html")
@click.argument("request", required=False)
@cluster_options
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="FILE.html is a page of its own, FILE.json Chrome's trace format, which ui.perfetto.dev opens.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--list", "lists", is_flag=True, help="List the last requests.")
def command(
    request: str | None,
    zmq: str | None,
    ready_file: Path | None,
    token: str,
    output: Path | None,
    as_json: bool,
    lists: bool,
) -> None:
    """Show where the time of REQUEST went, over all actors: the last one, or one by our id or its client's.

    Every actor remembers the last trace.requests of the cluster file; failed and cancelled ones are among them.
    """
    if output is not None and output.suffix not in FORMS:
        raise click.UsageError(f"{output}: the name must end in {' or '.join(FORMS)}")
    from rich.console import Console

    from pdactors.observe.timeline import Timeline

    with connect(zmq, ready_file, token) as client:
        found = {"requests": client.requests()} if lists else client.trace(request or "")
    if as_json:
        click.echo(json.dumps(found))
    elif lists:
        Console().print(_list(found["requests"]))
    if lists:
        return
    timeline = msgspec.convert(found, Timeline)
    if output is not None:
        output.write_text(_content(timeline, output.suffix), "utf-8")
    if not as_json:
        Console().print(_view(timeline), highlight=False)


def _content(timeline: Timeline, form: str) -> str:
    from pdactors.observe.chrome_trace import chrome_trace
    from pdactors.observe.pages import timeline_page

    return timeline_page(timeline) if form == ".html" else json.dumps(chrome_trace(timeline))


def _list(requests: list[dict[str, Any]]) -> Table:
    table = _table(("request", "prompt", "tokens", "TTFT ms", "total ms", "ended"), num_words=1)
    for found in requests:
        ttft, total = found.get("ttft_ms"), found.get("total_ms")
        table.add_row(
            found["request"],
            str(found.get("prompt_tokens", "")),
            str(found["num_tokens"]),
            "" if not ttft else f"{ttft:,.1f}",
            "" if total is None else f"{total:,.1f}",
            found.get("end", "running"),
        )
    return table


def _view(timeline: Timeline) -> Group:
    from rich.console import Group
    from rich.text import Text

    table = _table(("part", "ms", "share", "pieces"), num_words=1)
    ttft = timeline.total_ms if timeline.ttft_ms is None else timeline.ttft_ms
    groups = [("to the first token", timeline.first, ttft), ("after it", timeline.rest, timeline.total_ms - ttft)]
    for name, parts, total in groups:
        if not parts:
            continue
        for part in parts:
            share = f"{part.ms / total:.1%}" if total else ""
            table.add_row(f"  {part.what}", f"{part.ms:,.2f}", share, str(part.count))
        table.add_row(Text(name, style="bold"), Text(f"{total:,.2f}", style="bold"), end_section=True)
    apart = [lane for lane in timeline.lanes if not lane.clock.is_shared]
    clocks = [
        f"{lane.actor}: clock ahead by {1000 * lane.clock.offset_s:,.3f} ms, within {1000 * lane.clock.error_s:,.3f} ms"
        for lane in apart
    ]
    named = f" ({timeline.id})" if timeline.id else ""
    end = f"ended: {timeline.end} {timeline.message}" if timeline.end else "still running"
    return Group(
        Text(f"request {timeline.request}{named}: {timeline.num_tokens} tokens, {end}"),
        table,
        *(Text(line, style="dim") for line in clocks or ["all actors read the same clock: offset 0"]),
        *(Text(f"{name} did not tell", style="red") for name in timeline.silent),
    )


def _table(columns: tuple[str, ...], num_words: int) -> Table:
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i < num_words or column == "ended" else "right", no_wrap=i > 0)
    return table

"""`pdactors top`."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pdactors.cli.options import cluster_options, connect
from pdactors.errors import RequestTimeout

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

    from pdactors.client import Client

HEAD_LINES = 12  # of a view, beside its actors, moves and requests
STATE_STYLES = {"ready": "green", "lost": "red"}


@click.command("top", epilog="Example:  pdactors top --interval 0.5")
@cluster_options
@click.option("--interval", type=click.FloatRange(min=0.1), default=1.0, show_default=True, help="Seconds.")
@click.option("--once", is_flag=True, help="Show one interval and leave.")
@click.option("--json", "as_json", is_flag=True, help="Print one interval as a JSON object and leave.")
def command(zmq: str | None, ready_file: Path | None, token: str, interval: float, once: bool, as_json: bool) -> None:
    """Watch every actor of a running cluster, what moves between its nodes, and the last requests; Ctrl-C leaves."""
    from rich.console import Console
    from rich.live import Live

    console = Console()
    with connect(zmq, ready_file, token) as client:
        found = watch(client, interval)
        if as_json:
            click.echo(json.dumps(next(found)))
        elif once:
            console.print(view(next(found)))
        elif not console.is_terminal:
            for each in found:
                console.print(view(each))
        else:
            with Live(console=console, auto_refresh=False, screen=True) as live:
                try:
                    for each in found:
                        live.update(view(each, console.height), refresh=True)
                except KeyboardInterrupt:
                    pass


@dataclass(frozen=True)
class Sample:
    """What the cluster said at one moment."""

    at_s: float
    status: dict[str, Any]
    recent: list[dict[str, Any]]  # requests, the latest first


def watch(client: Client, interval_s: float) -> Iterator[dict[str, Any]]:
    """Yield the figures of one interval after the other; while there is no router, the last ones and what is wrong."""
    earlier = found = None
    while True:
        began_s = time.monotonic()
        try:
            later = Sample(began_s, client.status(), client.requests())
        except RequestTimeout as error:
            if found is None:
                raise
            yield {**found, "wrong": error.message}
            continue
        if earlier is not None:
            found = figures(earlier, later)
            yield found
        earlier = later
        time.sleep(interval_s)


# ---- Figures --------


def figures(earlier: Sample, later: Sample) -> dict[str, Any]:
    """Work out what happened between two samples: rates, shares, and how things stand at the end."""
    seconds = later.at_s - earlier.at_s
    status = later.status
    before = {(actor["name"], actor["incarnation"]): actor for actor in earlier.status["actors"]}
    actors = [_actor(before.get((a["name"], a["incarnation"])), a, seconds) for a in status["actors"]]
    sent = {move["request"]: move["num_bytes"] for a in earlier.status["actors"] for move in a.get("moves", ())}
    moves = [
        {**move, "from": a["name"], "mb_s": max(0, move["num_bytes"] - sent.get(move["request"], 0)) / seconds / 1e6}
        for a in status["actors"]
        for move in a.get("moves", ())
    ]
    return {
        **{name: status[name] for name in ("run_id", "mode", "model", "requests", "silent")},
        "seconds": seconds,
        "actors": actors,
        "moves": moves,
        "recent": later.recent,
    }


def _actor(before: dict[str, Any] | None, after: dict[str, Any], seconds: float) -> dict[str, Any]:
    kv, totals = after["kv_blocks"], _totals(after)
    rates = dict.fromkeys(("busy", "prompt_tokens_s", "tokens_s"))  # None where there is no such figure
    if before is not None:
        rates |= {name: max(0.0, totals[name] - total) / seconds for name, total in _totals(before).items()}
    return {
        **{name: after[name] for name in ("name", "role", "node", "state", "running", "waiting")},
        "kv_blocks": {"used": kv["used"] + kv["leased_out"], "total": kv["total"]},
        "step_ms": {name: after["step_ms"][name] for name in ("p50", "p99")},
        **rates,
    }


def _totals(actor: dict[str, Any]) -> dict[str, float]:
    """Return what an actor has done since it began, by the name of the rate."""
    counts = actor["counts"]
    if actor["way"]:  # an engine
        tokens = counts.get("sampled_tokens", 0)
        return {"busy": actor["busy_s"], "prompt_tokens_s": actor["prompt_tokens_computed"], "tokens_s": tokens}
    if actor["role"] == "gateway":
        return {"prompt_tokens_s": counts.get("prompt_tokens", 0), "tokens_s": counts.get("generated_tokens", 0)}
    return {}


# ---- View --------


def view(found: dict[str, Any], height: int = 40) -> Group:
    """Lay figures out for a terminal of 80 columns; where it is narrower, or names are long, these are folded."""
    from rich.console import Group
    from rich.text import Text

    queued = sum(actor["waiting"] for actor in found["actors"] if actor["role"] == "router")
    title = f"run {found['run_id']}, {found['mode']}, {found['model']}: {found['requests']} requests, {queued} queued"
    parts: list[Text | Table] = [Text(title), Text(), _actors(found["actors"])]
    parts += [Text(f"{name} did not answer", style="red") for name in found["silent"]]
    if found["moves"]:
        parts += [Text(), _moves(found["moves"])]
    room = height - HEAD_LINES - len(found["actors"]) - len(found["moves"])
    if found["recent"] and room > 0:
        parts += [Text(), _requests(found["recent"][:room])]
    if "wrong" in found:
        parts += [Text(), Text(found["wrong"], style="red")]
    return Group(*parts)


def _table(names: Iterable[str], numbers: Iterable[str]) -> Table:
    """Begin a table; names may be folded, numbers are not cut."""
    from rich.table import Table

    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim")
    for name in names:
        table.add_column(name, overflow="fold")
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _actors(actors: list[dict[str, Any]]) -> Table:
    from rich.text import Text

    table = _table(
        ("node", "actor", "state"),
        ("busy", "batch", "wait", "KV used", "step\np50 ms", "step\np99 ms", "prompt\ntok/s", "out\ntok/s"),
    )
    for actor in actors:
        kv, step = actor["kv_blocks"], actor["step_ms"]
        table.add_row(
            actor["node"],
            actor["name"].removeprefix(f"{actor['node']}/"),
            Text(actor["state"], style=STATE_STYLES.get(actor["state"], "yellow")),
            "" if actor["busy"] is None else f"{min(1.0, actor['busy']):.0%}",  # a step counts once it is over
            str(actor["running"]),
            str(actor["waiting"]),
            f"{kv['used']}/{kv['total']}" if kv["total"] else "",
            _number(step["p50"] or None),
            _number(step["p99"] or None),
            _number(actor["prompt_tokens_s"]),
            _number(actor["tokens_s"]),
        )
    return table


def _moves(moves: list[dict[str, Any]]) -> Table:
    table = _table(("KV on its way", "from", "to", "codec"), ("blocks", "MB", "MB/s"))
    for move in moves:
        blocks = f"{move['num_stored']}/{move['num_blocks']}"
        size, rate = f"{move['num_bytes'] / 1e6:.1f}", f"{move['mb_s']:.1f}"
        table.add_row(move["request"], _node(move["from"]), _node(move["to"]), move["codec"], blocks, size, rate)
    return table


def _requests(recent: list[dict[str, Any]]) -> Table:
    table = _table(("request", "end", "path"), ("prompt", "cached", "tokens", "TTFT\nms", "total\nms"))
    for each in recent:
        codec = each.get("codec", "none")
        table.add_row(
            each["request"],
            each.get("end", "under way"),
            each.get("path", "") + ("" if codec == "none" else f" {codec}"),
            *(str(each.get(name, "")) for name in ("prompt_tokens", "cached_tokens", "num_tokens")),
            *(_number(each.get(name)) for name in ("ttft_ms", "total_ms")),
        )
    return table


def _node(migrator: str) -> str:
    return migrator.removesuffix("/migrator")


def _number(value: float | None) -> str:
    """Write a figure in at most five characters, as long as it is below 100,000."""
    if value is None:
        return ""
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"

"""The report of a serving measurement: one HTML file with its plots in it. matplotlib's home."""

from __future__ import annotations

import html
import io
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from pdactors.bench.figures import by_kind, itl_ms, ttft_ms
from pdactors.bench.load import Record
from pdactors.bench.results import ServeBench
from pdactors.bench.table import COLUMNS, LEGEND, load_words, notes, rows
from pdactors.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH, HEIGHT = 4.6, 3.4  # inches of a plot
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 78rem; margin: 2rem auto; padding: 0 1rem; color: #1c1c1c }
.verdict { font-size: 1.15rem; border-left: 4px solid #4477aa; padding-left: .8rem }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { padding: .25rem .7rem; text-align: right; border-bottom: 1px solid #ddd; white-space: nowrap }
th:nth-child(-n+2), td:nth-child(-n+2) { text-align: left }
.table { overflow-x: auto } svg { max-width: 100%; height: auto }
"""


def check_plots() -> None:
    """Raise ConfigError if matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ConfigError("a report's plots need matplotlib: pip install 'pdactors[bench]'") from None


def make_report(bench: ServeBench, records: Mapping[str, Sequence[Record]]) -> str:
    """Return the HTML of a measurement; `records` are by server, as in `bench`. Nothing in it is loaded from elsewhere.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    check_plots()
    told = {name: [record for record in found if record.stamps] for name, found in records.items()}
    told = {name: found for name, found in told.items() if found}
    shown = [
        ("Between tokens: how many gaps were longer", _gaps_plot(told)),
        ("To the first token", _ttft_plot(told)),
        ("Requests a second, and in time", _goodput_plot(bench)),
        ("How busy the engines were", _busy_plot(bench)),
        ("Rates that were tried", _tries_plot(bench)),
    ]
    head = "".join(f"<th>{html.escape(column)}</th>" for column in COLUMNS)
    body = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in rows(bench))
    figures = "".join(f"<h2>{html.escape(title)}</h2>{svg(figure)}" for title, figure in shown if figure is not None)
    items = "".join(f"<li>{html.escape(note)}</li>" for note in notes(bench))
    title = f"bench serve: {bench.model}, {bench.workload}"
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{STYLE}</style></head><body><h1>{html.escape(title)}</h1>"
        f'<p class="verdict">{html.escape(bench.verdict)}</p>'
        f"<p>{html.escape(bench.model)} in {html.escape(bench.dtype)} on {html.escape(bench.place)}; "
        f"{html.escape(load_words(bench))}; seed {bench.seed}.</p>"
        f'<div class="table"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
        f"<p>{html.escape(LEGEND)}.</p><ul>{items}</ul>{figures}</body></html>\n"
    )


# ---- Plots: None where there is nothing to show --------


def _gaps_plot(records: Mapping[str, Sequence[Record]]) -> Figure | None:
    """Of each kind, the share of inter-token gaps that were longer than so many milliseconds, both logarithmic."""
    kinds = _kinds(records, lambda record: len(record.stamps) > 1)
    if not kinds:
        return None
    figure, axes = plots(len(kinds))
    for (kind, by_server), axis in zip(kinds.items(), axes, strict=True):
        for name, found in by_server.items():
            gaps = np.sort([gap for record in found for gap in itl_ms(record)])
            axis.plot(np.maximum(gaps, 0.1), 1 - np.arange(len(gaps)) / len(gaps), label=name, drawstyle="steps-post")
        axis.set(yscale="log", title=kind, xlabel="inter-token latency, ms", ylabel="share longer")
        _by_decades(axis)
    return figure


def _ttft_plot(records: Mapping[str, Sequence[Record]]) -> Figure | None:
    kinds = _kinds(records, lambda record: True)
    if not kinds:
        return None
    figure, axes = plots(len(kinds))
    for (kind, by_server), axis in zip(kinds.items(), axes, strict=True):
        for name, found in by_server.items():
            times = np.sort([max(ttft_ms(record), 0.1) for record in found])
            axis.plot(times, np.arange(1, len(times) + 1) / len(times), label=name, drawstyle="steps-post")
        axis.set(ylim=(0, 1), title=kind, xlabel="time to first token, ms", ylabel="share at most")
        _by_decades(axis)
    return figure


def _goodput_plot(bench: ServeBench) -> Figure | None:
    found = {name: result.overall for name, result in bench.servers.items() if result.overall is not None}
    if not found:
        return None
    figure, (axis,) = plots(1)
    places = np.arange(len(found))
    axis.bar(places - 0.2, [figures.requests_s for figures in found.values()], 0.4, label="completed")
    axis.bar(places + 0.2, [figures.goodput_s for figures in found.values()], 0.4, label="in time (goodput)")
    axis.set(ylabel="requests/s")
    axis.set_xticks(places, list(found))
    axis.legend()
    return figure


def _busy_plot(bench: ServeBench) -> Figure | None:
    shares = {
        f"{name}\n{actor}": share
        for name, result in bench.servers.items()
        for actor, share in result.busy_shares().items()
    }
    if not shares:
        return None
    figure, (axis,) = plots(1, width=max(WIDTH, 1.1 * len(shares)))
    axis.bar(range(len(shares)), list(shares.values()))
    axis.set(ylabel="cores busy")
    axis.set_xticks(range(len(shares)), list(shares), fontsize=8)
    return figure


def _tries_plot(bench: ServeBench) -> Figure | None:
    tries = {name: [one for run in result.rounds for one in run.tries] for name, result in bench.servers.items()}
    tries = {name: sorted(found, key=lambda one: one.rate) for name, found in tries.items() if found}
    if not tries:
        return None
    figure, (axis,) = plots(1)
    for name, found in tries.items():
        axis.plot([one.rate for one in found], [one.slo_share for one in found], marker="o", label=name)
    axis.axhline(bench.objective.share, color="gray", linestyle=":")
    axis.set(xlabel="offered requests/s", ylabel="share in time", ylim=(-0.02, 1.02))
    axis.legend()
    return figure


def _kinds(
    records: Mapping[str, Sequence[Record]], has: Callable[[Record], bool]
) -> dict[str, dict[str, list[Record]]]:
    """Sort the records that have what is plotted by kind, then by server."""
    kinds: dict[str, dict[str, list[Record]]] = {}
    for name, found in records.items():
        for kind, part in by_kind(record for record in found if has(record)).items():
            kinds.setdefault(kind, {})[name] = part
    return dict(sorted(kinds.items()))


def plots(count: int, *, width: float = WIDTH) -> tuple[Figure, list[Axes]]:
    """Return a figure with so many axes side by side."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * count, HEIGHT), layout="constrained")
    axes = [figure.add_subplot(1, count, 1 + i) for i in range(count)]
    for axis in axes:
        axis.grid(alpha=0.3)
    return figure, axes


def _by_decades(axis: Axes) -> None:
    """Make the x axis logarithmic, with plain numbers at 1, 2 and 5, and name the lines."""
    from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

    axis.set_xscale("log")
    axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.xaxis.set_major_formatter(ScalarFormatter())
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.legend()


def svg(figure: Figure) -> str:
    """Return the figure as an element that stands in a page."""
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()[text.getvalue().index("<svg") :]

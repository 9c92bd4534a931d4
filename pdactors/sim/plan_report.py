"""What a plan says, as a table and as one HTML file with its plot."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING

from pdactors.bench.report import STYLE, plots, svg
from pdactors.sim.plan import Candidate, PlanResult

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLUMNS = ("cluster", "devices", "price", "in time", "goodput/s", "TTFT ms", "TPOT ms", "busy")  # P50/P99


def rows(found: PlanResult) -> list[tuple[str, ...]]:
    """Return a row for the best plan and for each other one."""
    return [_row(candidate) for candidate in candidates(found)]


def candidates(found: PlanResult) -> list[Candidate]:
    """Return the plans, the best first."""
    return ([found.best] if found.best else []) + found.others


def words(found: PlanResult) -> str:
    """Say what was found in a sentence or two."""
    objective = found.objective
    asked = (
        f"{found.rate:g} requests/s of {found.workload}, {objective.share:.0%} of them with TTFT within "
        f"{objective.ttft_ms:g} ms and TPOT within {objective.tpot_ms:g} ms"
    )
    if found.best is None:
        return f"No cluster that was tried holds {asked}."
    text = f"The cheapest that holds {asked}: {found.best.cluster.words} ({found.best.devices} {found.hardware})."
    if found.others:
        text += f" Next: {found.others[0].cluster.words} ({found.others[0].devices})."
    return text


def make_report(found: PlanResult) -> str:
    """Return the HTML of a plan; raises ConfigError where matplotlib is missing (`bench.report.check_plots`)."""
    head = "".join(f"<th>{html.escape(column)}</th>" for column in COLUMNS)
    body = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in rows(found))
    limits = "".join(
        f"<li>{html.escape(candidate.cluster.words)}: {html.escape(candidate.limit)}</li>"
        for candidate in candidates(found)
    )
    title = f"plan: {found.model} on {found.hardware}, {found.workload}"
    ratios = f"<h2>Goodput by ratio of prefill to decode</h2>{svg(_ratio_plot(found))}" if found.ratios else ""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{STYLE}</style></head><body><h1>{html.escape(title)}</h1>"
        f'<p class="verdict">{html.escape(words(found))}</p>'
        f'<div class="table"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
        f"<h2>What limits each</h2><ul>{limits}</ul>{ratios}</body></html>\n"
    )


def _row(candidate: Candidate) -> tuple[str, ...]:
    figures = candidate.figures
    spreads = [f"{s.p50:.0f}/{s.p99:.0f}" if s is not None else "-" for s in (figures.ttft_ms, figures.tpot_ms)]
    busy = ", ".join(f"{role} {share:.0%}" for role, share in candidate.busy.items())
    return (
        candidate.cluster.words,
        f"{candidate.devices}",
        f"{candidate.price:g}",
        f"{figures.slo_share:.1%}",
        f"{figures.goodput_s:.2f}",
        *spreads,
        busy,
    )


def _ratio_plot(found: PlanResult) -> Figure:
    figure, (axis,) = plots(1, width=6.0)
    axis.plot([f"{ratio.prefill}:{ratio.decode}" for ratio in found.ratios], [r.max_rate for r in found.ratios], "o-")
    axis.set(xlabel="prefill : decode engines", ylabel="highest rate within the objective, requests/s", ylim=(0, None))
    return figure

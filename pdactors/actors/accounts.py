"""What `status` and `leaks` say, put together from the actors' reports. Pure."""

from __future__ import annotations

from typing import Any

import msgspec

from pdactors.actors.spec import ENGINES
from pdactors.messages import Report, Surveyed

OWNERS = (*ENGINES, "migrator")  # of blocks


def status(run_id: str, mode: str, model: str, survey: Surveyed) -> dict[str, Any]:
    """Describe every actor that answered; `silent` lists those that did not."""
    reports = sorted(
        survey.reports, key=lambda report: (report.node, report.role not in ("gateway", "router"), report.name)
    )
    return {
        "run_id": run_id,
        "mode": mode,
        "model": model,
        "actors": [_actor(report) for report in reports],
        "requests": len(survey.in_flight),
        "silent": list(survey.silent),
    }


def leaks(survey: Surveyed) -> dict[str, Any]:
    """Find what is held for nobody. Work in flight is not a leak."""
    in_flight = set(survey.in_flight)
    owners = [report for report in survey.reports if report.role in OWNERS]
    return {
        "leases": [
            msgspec.to_builtins(lease) for report in owners for lease in report.leases if lease.request not in in_flight
        ],
        "blocks_unaccounted": sum(_unaccounted(report) for report in survey.reports),
        "stale_segments": [],
        "stray_requests": [
            {"actor": report.name, "request": request}
            for report in owners
            for request in report.requests
            if request not in in_flight
        ],
        "faults": [f"{report.name}: {fault}" for report in survey.reports for fault in report.faults],
        "silent": list(survey.silent),
    }


def lasting(earlier: dict[str, Any], later: dict[str, Any]) -> dict[str, Any]:
    """Return what both `leaks` answers found: what was on its way back when the first was asked is no leak."""

    def names(found: list[Any]) -> list[Any]:
        return [
            {k: v for k, v in item.items() if k != "expires_s"} if isinstance(item, dict) else item for item in found
        ]

    both: dict[str, Any] = {}
    for what, found in later.items():
        if isinstance(found, list):
            known = names(earlier[what])
            both[what] = [item for item, name in zip(found, names(found), strict=True) if name in known]
        else:
            both[what] = min(found, earlier[what])
    return both


def is_clean(found: dict[str, Any]) -> bool:
    """Say whether a `leaks` answer found nothing."""
    return not any(found.values())


def _actor(report: Report) -> dict[str, Any]:
    blocks = report.load.blocks
    step = report.load.step_ms
    moved = {
        "sequences": report.counts.get("migrations", 0),
        "pruned": report.counts.get("migrations_pruned", 0),
        "bytes": report.counts.get("migrated_bytes", 0),
    }
    return {
        "name": report.name,
        "role": report.role,
        "node": report.node,
        "rack": report.rack,
        "state": report.state,
        "pid": report.pid,
        "incarnation": report.incarnation,
        "running": report.load.running,
        "waiting": report.load.waiting,
        "kv_blocks": {
            "total": blocks.total,
            "free": blocks.free,
            "cached": blocks.cached,
            "used": blocks.used,
            "leased_out": blocks.leased_out,
            "leased_in": blocks.leased_in,
        },
        "step_ms": {"mean": step.mean, "p50": step.p50, "p99": step.p99},
        "way": report.load.way,
        "busy_s": report.load.busy_s,
        "counts": report.counts,
        "use": {
            phase: {"flops_share": use.flops_share, "bandwidth_share": use.bandwidth_share}
            for phase, use in (("prefill", report.load.prefill_use), ("decode", report.load.decode_use))
            if use.num_steps
        },
        "prompt_tokens_computed": report.load.prompt_tokens_computed,
        "preempted": report.load.num_preempted,
        **({"moved": moved, "moves": msgspec.to_builtins(report.moves)} if report.role == "migrator" else {}),
        "dropped": sum(report.dropped.values()),
        "dropped_by_kind": report.dropped,
    }


def _unaccounted(report: Report) -> int:
    """Blocks in no state, and blocks in use by an owner that has no request."""
    blocks = report.load.blocks
    lost = abs(blocks.total - blocks.free - blocks.cached - blocks.used - blocks.leased_out)
    is_idle = report.role in OWNERS and not report.requests
    return lost + (blocks.used if is_idle else 0)

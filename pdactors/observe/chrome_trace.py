"""A timeline in Chrome's Trace Event Format, which Perfetto and chrome://tracing open. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from pdactors.observe.timeline import Lane, Part, Timeline

BREAKDOWN = "where the time went"


def chrome_trace(timeline: Timeline) -> dict[str, Any]:
    """Return the JSON object: a process for each node, a thread for each actor, and one lane with the breakdown.

    Times are microseconds since the gateway received the request.
    """
    nodes = {name: i for i, name in enumerate(dict.fromkeys(lane.node for lane in timeline.lanes), 2)}
    events = [*_names(1, f"request {timeline.request}", {1: BREAKDOWN})]
    for node, pid in nodes.items():
        events += _names(pid, node, {i: lane.actor for i, lane in enumerate(timeline.lanes, 1) if lane.node == node})
    events += _parts(timeline.first, 0.0)
    events += _parts(timeline.rest, timeline.ttft_ms or 0.0)
    for i, lane in enumerate(timeline.lanes, 1):
        events += _lane(lane, nodes[lane.node], i)
    told = msgspec.to_builtins(timeline)
    clocks = {lane.actor: msgspec.to_builtins(lane.clock) for lane in timeline.lanes}
    left_out = ("lanes", "first", "rest")
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {**{key: value for key, value in told.items() if key not in left_out}, "clocks": clocks},
    }


def _names(pid: int, process: str, threads: dict[int, str]) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": process}}
    yield {"ph": "M", "pid": pid, "name": "process_sort_index", "args": {"sort_index": pid}}
    for tid, name in threads.items():
        yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": name}}
        yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}}


def _parts(parts: tuple[Part, ...], at_ms: float) -> Iterator[dict[str, Any]]:
    """One after the other: the sums, not when each piece was."""
    for part in parts:
        yield _complete(1, 1, part.what, at_ms, at_ms + part.ms, {"pieces": part.count})
        at_ms += part.ms


def _lane(lane: Lane, pid: int, tid: int) -> Iterator[dict[str, Any]]:
    for i, span in enumerate(lane.spans):
        args = {**span.detail, "attempt": span.attempt}
        if span.until_ms is None:
            yield {"ph": "i", "s": "t", "pid": pid, "tid": tid, "name": span.what, "ts": _us(span.at_ms), "args": args}
        elif lane.role == "migrator":  # transfers overlap, which a thread's own events may not
            same = {"cat": "transfer", "id": f"{tid}.{i}", "pid": pid, "tid": tid, "name": span.what}
            yield {**same, "ph": "b", "ts": _us(span.at_ms), "args": args}
            yield {**same, "ph": "e", "ts": _us(span.until_ms), "args": {}}
        else:
            yield _complete(pid, tid, span.what, span.at_ms, span.until_ms, args)
    for at_ms, until_ms, batch in zip(lane.step_at_ms, lane.step_until_ms, lane.step_batch, strict=True):
        yield _complete(pid, tid, "decode step", at_ms, until_ms, {"batch": batch})
    for i, at_ms in enumerate(lane.written_ms):
        moment = {"ph": "i", "s": "t", "pid": pid, "tid": tid, "ts": _us(at_ms)}
        yield {**moment, "name": "token written", "args": {"index": i}}


def _complete(pid: int, tid: int, name: str, at_ms: float, until_ms: float, args: dict[str, Any]) -> dict[str, Any]:
    span = {"ts": _us(at_ms), "dur": max(0.0, _us(until_ms) - _us(at_ms))}
    return {"ph": "X", "pid": pid, "tid": tid, "name": name, **span, "args": args}


def _us(ms: float) -> float:
    return round(1000 * ms, 1)

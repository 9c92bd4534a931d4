from __future__ import annotations

from pdactors.bench.figures import Figures, Spread
from pdactors.bench.results import ActorUse, GeneratorUse, Run, ServerResult
from pdactors.bench.verdict import verdict


def result(
    *, goodput_s: float = 2.0, itl: float = 100.0, ttft: float = 200.0, max_rate: float | None = None, **busy: float
) -> ServerResult:
    """A server whose figures are these, and whose engines were as busy as said."""
    spread = {name: Spread(value, value, value, value) for name, value in (("ttft_ms", ttft), ("itl_ms", itl))}
    overall = Figures(10, 10, {}, 100, 0, 50, goodput_s, 20.0, goodput_s, 1.0, paths={}, tpot_ms=None, **spread)
    actors = {name.replace("_", "-"): ActorUse(name.partition("_")[0], share) for name, share in busy.items()}
    run = Run(1.0, 10.0, overall, {"chat": overall}, actors, GeneratorUse(0.01, 0.1))
    return ServerResult([run], overall, {"chat": overall}, max_rate)


def test_nothing_measured_and_one_alone_are_said():
    assert verdict({"chunked": ServerResult(error="no")}).startswith("Nothing was measured")
    assert "Only chunked was measured" in verdict({"chunked": result(), "colocated": ServerResult(error="no")})


def test_goodput_decides_before_latency():
    found = verdict({"chunked": result(goodput_s=3.0, itl=400.0), "disaggregated": result(goodput_s=2.0, itl=50.0)})
    assert found.startswith("chunked wins here: its goodput is 3/s against 2/s of disaggregated")
    assert "pays with a P99 inter-token latency of 400 ms (disaggregated: 50 ms)" in found


def test_at_equal_goodput_the_tail_between_tokens_decides():
    servers = {
        "colocated": result(goodput_s=2.0, itl=600.0, ttft=100.0),
        "chunked": result(goodput_s=1.99, itl=200.0),
        "disaggregated": result(goodput_s=1.98, itl=60.0, ttft=300.0),
    }
    found = verdict(servers)
    assert found.startswith("disaggregated wins here: its P99 inter-token latency is 60 ms against ")
    assert "200 ms of chunked" in found
    assert "600 ms of colocated" in found
    assert "because no prompt runs between its decode steps." in found
    assert "pays with a median TTFT of 300 ms (colocated: 100 ms)" in found


def test_who_lost_at_an_earlier_criterion_cannot_win_a_later_one():
    servers = {
        "colocated": result(goodput_s=1.0, itl=1.0),
        "chunked": result(goodput_s=2.0, itl=200.0),
        "disaggregated": result(goodput_s=2.0, itl=100.0),
    }
    assert verdict(servers).startswith("disaggregated wins here: its P99 inter-token latency")


def test_the_highest_rate_decides_where_it_was_looked_for():
    servers = {"chunked": result(max_rate=4.0, goodput_s=1.0), "disaggregated": result(max_rate=2.0, goodput_s=1.5)}
    assert verdict(servers).startswith("chunked wins here: its highest rate within the objective is 4/s against 2/s")


def test_an_engine_that_stood_idle_is_the_reason():
    servers = {
        "chunked": result(goodput_s=3.0, worker_0=0.9, worker_1=0.9),
        "disaggregated": result(goodput_s=2.0, prefill_0=0.98, decode_0=0.4),
    }
    assert "while in disaggregated decode-0 was busy for 40% of the time and prefill-0 for 98%" in verdict(servers)


def test_a_server_that_held_no_rate_loses_to_any_that_did():
    found = verdict({"http://a": result(max_rate=0.0), "http://b": result(max_rate=0.5)})
    assert found.startswith(
        "http://b wins here: its highest rate within the objective is 0.5/s against 0/s of http://a."
    )


def test_equals_are_called_equal():
    servers = {"colocated": result(), "chunked": result(goodput_s=2.02, itl=101.0), "disaggregated": result(itl=300.0)}
    assert (
        verdict(servers)
        == "colocated and chunked are equal here, as far as noise lets one say, ahead of disaggregated."
    )

"""One request over all actors: on one clock, and parts that add up."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdactors.errors import BadRequest
from pdactors.messages import Report, Role
from pdactors.observe.chrome_trace import BREAKDOWN, chrome_trace
from pdactors.observe.pages import home_page, timeline_page
from pdactors.observe.timeline import Part, Timeline, make_timeline
from pdactors.stamps import Clock, Stamp, Stamps, Steps

AHEAD_S = 5000.0
SHARED = Clock(is_shared=True)
CLOCKS = {"n0/p": SHARED, "n0/m": SHARED, "n1/m": Clock(AHEAD_S, 0.001), "n1/d": Clock(AHEAD_S, 0.001)}


def report(name: str, role: Role, node: str, *stamps: Stamp, ahead_s: float = 0.0, **more: object) -> Report:
    told = Stamps(
        tuple(
            msgspec.structs.replace(
                s, at_s=s.at_s + ahead_s, until_s=None if s.until_s is None else s.until_s + ahead_s
            )
            for s in stamps
        ),
        **more,  # type: ignore[arg-type]
    )
    return Report(name, role, node, "r0", "ready", 1, 1, stamps=told)


def cluster(ahead_s: float = AHEAD_S) -> list[Report]:
    """A request that prefills on n0, moves, and decodes on n1, whose clock is ahead; seconds are tenths here."""
    steps = Steps(tuple(ahead_s + t for t in (2.2, 2.4)), tuple(ahead_s + t for t in (2.3, 2.5)), (3, 4))
    return [
        report(
            "gateway",
            "gateway",
            "n0",
            Stamp("received", 1.0, detail={"id": "mine"}),
            Stamp("tokenised", 1.1),
            Stamp("done", 2.6, detail={"end": "length", "path": "ucx", "codec": "int8"}),
            written_s=(1.8, 2.35, 2.55),
        ),
        report(
            "router",
            "router",
            "n0",
            Stamp("queued", 1.15),
            Stamp("prefilling", 1.2, detail={"at": "n0/p"}),
            Stamp("waiting", 1.75),
            Stamp("migrating", 1.76),
            Stamp("adopting", 2.0),
            Stamp("decoding", 2.15),
            Stamp("gone", 2.58),
        ),
        report(
            "n0/p",
            "prefill",
            "n0",
            Stamp("received", 1.25),
            Stamp("admitted", 1.3),
            Stamp("chunk", 1.3, 1.5),
            Stamp("chunk", 1.55, 1.7),
            Stamp("first token", 1.72),
        ),
        report("n0/m", "migrator", "n0", Stamp("send", 1.6, 1.9, detail={"path": "ucx", "codec": "int8"})),
        report("n1/m", "migrator", "n1", Stamp("receive", 1.6, 1.95), ahead_s=ahead_s),
        report("n1/d", "decode", "n1", Stamp("received", 2.05), Stamp("admitted", 2.1), ahead_s=ahead_s, steps=steps),
    ]


def made(reports: list[Report], now_s: float = 9.0) -> Timeline:
    return make_timeline("r", reports, CLOCKS, (), now_s, 1e9)


def total(parts: tuple[Part, ...]) -> float:
    return sum(part.ms for part in parts)


def test_where_the_time_went_is_told_part_by_part_and_adds_up() -> None:
    found = made(cluster())
    assert (found.id, found.end, found.num_tokens) == ("mine", "length", 3)
    assert (found.ttft_ms, found.total_ms) == (800.0, 1600.0)
    assert {part.what: part.ms for part in found.first} == pytest.approx(
        {
            "tokenising": 100,
            "to the router": 50,
            "queued": 50,
            "to the engine": 50,
            "waiting for room": 50,
            "prompt chunks": 350,
            "between steps": 70,
            "to the client": 80,
        }
    )
    assert {part.what: part.ms for part in found.rest} == pytest.approx(
        {
            "KV moves": 200,
            "to decode": 50,
            "waiting for room": 50,
            "between steps": 200,
            "decode steps": 200,
            "to the client": 100,
        }
    )
    assert found.received_at == pytest.approx(1e9 - 8)


def test_other_machines_clocks_are_brought_to_ours() -> None:
    found = made(cluster())
    lanes = {lane.actor: lane for lane in found.lanes}
    assert [*lanes] == ["gateway", "router", "n0/p", "n0/m", "n1/m", "n1/d"]
    assert lanes["n1/m"].spans[0].at_ms == pytest.approx(600, abs=0.01)
    assert lanes["n1/d"].step_at_ms == pytest.approx((1200, 1400), abs=0.01)
    assert lanes["n1/d"].step_batch == (3, 4)
    assert lanes["n1/d"].clock == Clock(AHEAD_S, 0.001)
    stages = {span.what: span for span in lanes["router"].spans}
    assert (stages["migrating"].at_ms, stages["migrating"].until_ms) == pytest.approx((760, 1000))


def test_an_actor_whose_clock_is_not_known_is_left_out_and_named() -> None:
    found = make_timeline("r", cluster(), {"n0/p": SHARED, "n0/m": SHARED}, ("n9/d",), 9.0, 1e9)
    assert found.silent == ("n9/d", "n1/m", "n1/d")
    assert total(found.first) == pytest.approx(800)
    assert total(found.rest) == pytest.approx(800)


def test_a_request_that_failed_before_its_first_token_adds_up_too() -> None:
    reports = [
        report(
            "gateway",
            "gateway",
            "n0",
            Stamp("received", 1.0),
            Stamp("tokenised", 1.1),
            Stamp("failed", 3.0, detail={"end": "timeout", "message": "too late"}),
        ),
        report("router", "router", "n0", Stamp("queued", 1.2), Stamp("gone", 2.9, detail={"why": "timeout"})),
    ]
    found = made(reports)
    assert (found.end, found.message, found.ttft_ms, found.rest) == ("timeout", "too late", None, ())
    assert {part.what: part.ms for part in found.first} == pytest.approx(
        {"tokenising": 100, "to the router": 100, "queued": 1700, "to the client": 100}
    )


def test_a_request_that_goes_on_is_told_up_to_now() -> None:
    reports = cluster()
    gateway = reports[0].stamps
    assert gateway is not None
    reports[0] = msgspec.structs.replace(reports[0], stamps=msgspec.structs.replace(gateway, stamps=gateway.stamps[:2]))
    found = made(reports, now_s=4.0)
    assert (found.end, found.total_ms) == ("", 3000.0)
    assert total(found.first) + total(found.rest) == pytest.approx(3000)


def test_a_preempted_request_says_how_long_it_waited() -> None:
    reports = cluster()
    again = Stamp("admitted", AHEAD_S + 2.35, detail={"again": 1})
    told = reports[-1].stamps
    assert told is not None
    reports[-1] = msgspec.structs.replace(
        reports[-1], stamps=msgspec.structs.replace(told, stamps=(*told.stamps, again))
    )
    assert {part.what: part.ms for part in made(reports).rest}["preempted"] == pytest.approx(50)


def test_an_unknown_request_is_refused() -> None:
    with pytest.raises(BadRequest, match="not among the last"):
        make_timeline("r", [Report("gateway", "gateway", "n0", "r0", "ready", 1, 1)], {}, (), 1.0, 1.0)


moments = st.floats(0.0, 100.0)
stages = st.sampled_from(["queued", "pinning", "prefilling", "waiting", "migrating", "adopting", "decoding", "gone"])


@given(
    st.lists(st.tuples(stages, moments), max_size=12),
    st.lists(st.tuples(st.sampled_from(["received", "admitted", "first token"]), moments), max_size=8),
    st.lists(st.tuples(moments, moments), max_size=8),
    st.lists(moments, max_size=5),
    st.sampled_from(["prefill", "decode", "worker"]),
    moments,
)
def test_whatever_actors_tell_the_parts_add_up(router, engine, spans, written, role, end) -> None:
    chunks = [Stamp("chunk", min(span), max(span)) for span in spans]
    steps = Steps(tuple(min(s) for s in spans), tuple(max(s) for s in spans), tuple(1 for _ in spans))
    written = tuple(sorted(w for w in written if w <= end))
    gateway = [Stamp("received", 0.0), Stamp("done", end, detail={"end": "stop"})]
    found = make_timeline(
        "r",
        [
            report("gateway", "gateway", "n0", *gateway, written_s=written),
            report("router", "router", "n0", *(Stamp(what, at) for what, at in router)),
            report("n0/p", role, "n0", *(Stamp(what, at) for what, at in engine), *chunks, steps=steps),
        ],
        CLOCKS,
        (),
        end,
        0.0,
    )
    assert total(found.first) == pytest.approx(found.total_ms if found.ttft_ms is None else found.ttft_ms, abs=0.1)
    assert total(found.first) + total(found.rest) == pytest.approx(found.total_ms, abs=0.1)
    assert all(part.ms > 0 for part in (*found.first, *found.rest))


# ---- Forms --------


def test_chromes_format_has_a_thread_for_each_actor_and_nothing_out_of_order() -> None:
    found = json.loads(json.dumps(chrome_trace(made(cluster()))))
    events = found["traceEvents"]
    named = {event["args"]["name"] for event in events if event["ph"] == "M" and event["name"] == "thread_name"}
    assert named == {BREAKDOWN, "gateway", "router", "n0/p", "n0/m", "n1/m", "n1/d"}
    spans = [event for event in events if event["ph"] == "X"]
    assert sum(event["dur"] for event in spans if event["pid"] == 1) == pytest.approx(1.6e6, abs=10)
    (chunk,) = [event for event in spans if event["name"] == "chunk" and event["ts"] == pytest.approx(300_000)]
    assert chunk["dur"] == pytest.approx(200_000)
    began = {event["id"]: event["ts"] for event in events if event["ph"] == "b"}
    ended = {event["id"]: event["ts"] for event in events if event["ph"] == "e"}
    assert began.keys() == ended.keys()
    assert all(began[id] <= ended[id] for id in began)
    assert found["otherData"]["clocks"]["n1/d"]["error_s"] == 0.001


def test_a_page_holds_its_data_and_cannot_be_broken_out_of() -> None:
    evil = "</script><script>alert(1)</script>"
    page = timeline_page(msgspec.structs.replace(made(cluster()), id=evil, message="<!--"))
    assert evil not in page
    assert page.count("</script>") == timeline_page().count("</script>")
    data = page.split('id="data">')[1].split("</script>")[0]
    assert json.loads(data)["id"] == evil


@pytest.mark.parametrize("page", [home_page(), timeline_page()], ids=["home", "timeline"])
def test_a_page_names_no_other_host_and_nothing_is_left_to_fill_in(page: str) -> None:
    links = [part.split('"')[0] for part in page.split("http")[1:]]
    assert {f"http{link}" for link in links if link.startswith(("://", "s://"))} <= {"http://www.w3.org/2000/svg"}
    assert not [mark for mark in ("/*STYLE*/", "/*ASK*/", "/*DATA*/") if mark in page]

from __future__ import annotations

import sys
from html.parser import HTMLParser
from xml.etree import ElementTree

import msgspec
import pytest

from pdactors.bench.figures import Objective, by_kind, figures
from pdactors.bench.load import Record
from pdactors.bench.report import make_report
from pdactors.bench.results import ActorUse, GeneratorUse, Load, Run, ServeBench, ServerResult, Try
from pdactors.bench.table import COLUMNS, load_words, notes, rows
from pdactors.errors import ConfigError

OBJECTIVE = Objective()


def records(kind: str, gap_s: float) -> list[Record]:
    return [
        Record(kind, 100, i * 1.0, i * 1.0, tuple(i + 0.2 + gap_s * n for n in range(5)), i + 1.0, 5) for i in range(6)
    ]


def bench(**servers: ServerResult) -> ServeBench:
    load = Load(rate=2.0, seconds=10.0)
    return ServeBench("<model>", "bfloat16", "mixed", 1, load, OBJECTIVE, 2, servers, "a wins & b <loses>.")


@pytest.fixture
def measured() -> tuple[ServeBench, dict[str, list[Record]]]:
    """Two servers, one of which failed some requests, and a third that did not start."""
    told = {"chunked": records("chat", 0.05) + records("long", 0.2), "disaggregated": records("chat", 0.03)}
    told["chunked"].append(Record("chat", 5, 0.0, 0.0, (), 1.0, error="overloaded"))
    servers = {}
    for name, found in told.items():
        overall = figures(found, 10.0, OBJECTIVE)
        kinds = {kind: figures(part, 10.0, OBJECTIVE) for kind, part in by_kind(found).items()}
        actors = {"n0/worker-0": ActorUse("worker", 0.7), "router": ActorUse("router", 0.1)}
        run = Run(
            2.0, 10.0, overall, kinds, actors, GeneratorUse(0.02, 0.4), [Try(2.0, 1.0, True), Try(4.0, 0.5, False)]
        )
        servers[name] = ServerResult([run], overall, kinds, 2.0)
    return bench(**servers, colocated=ServerResult(error="<it> did not start")), told


class Page(HTMLParser):
    """Notes what a page loads, and checks that tags are closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        for name, value in attrs:
            assert name != "src"
            assert name not in ("href", "xlink:href") or (value or "").startswith("#")
        if tag not in ("meta", "br", "hr"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_a_report_is_one_page_with_its_plots_and_loads_nothing(measured):
    text = make_report(*measured)
    page = Page(text)
    assert page.open == []
    assert page.tags.count("svg") == 5
    assert "script" not in page.tags
    for svg in text.split("<svg")[1:]:
        ElementTree.fromstring("<svg" + svg[: svg.index("</svg>")] + "</svg>")


def test_what_came_from_outside_is_escaped(measured):
    text = make_report(*measured)
    assert "<model>" not in text
    assert "&lt;model&gt;" in text
    assert "a wins &amp; b &lt;loses&gt;." in text
    assert "&lt;it&gt; did not start" in text


def test_a_report_of_nothing_has_no_plots():
    empty = bench(chunked=ServerResult(error="no"))
    assert "<svg" not in make_report(empty, {"chunked": []})


def test_missing_plots_are_said_with_what_to_install(measured, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"pip install 'pdactors\[bench\]'"):
        make_report(*measured)


def test_the_table_has_a_row_for_each_kind_and_one_for_all_of_several(measured):
    found = rows(measured[0])
    assert [row[:2] for row in found] == [
        ("chunked", "all"),
        ("chunked", "chat"),
        ("chunked", "long"),
        ("disaggregated", "chat"),
    ]
    assert all(len(row) == len(COLUMNS) for row in found)
    chat = dict(zip(COLUMNS, next(row for row in found if row[:2] == ("chunked", "chat")), strict=True))
    assert (chat["n"], chat["failed"], chat["TTFT"], chat["ITL"]) == ("7", "1", "200/200", "50.0/50.0/50.0")


def test_the_notes_say_rates_shares_failures_and_the_generator(measured):
    found = "\n".join(notes(measured[0]))
    for part in ("2.00 requests/s", "n0/worker-0 70%", "failed: 1 overloaded", "colocated: <it> did not start"):
        assert part in found
    assert "generator: busy 2% of a core at most" in found
    assert "router" not in found


@pytest.mark.parametrize(
    ("load", "part"),
    [
        (Load(rate=2.0, seconds=10.0), "Poisson arrivals at 2/s, 10 s"),
        (Load(concurrency=8, requests=50), "8 in flight, 50 requests"),
        (Load(find_max_rate=True, seconds=30.0), "looking for the highest rate, 30 s"),
        (Load(), "at the trace's own times, to its end"),
    ],
)
def test_the_load_is_put_in_words(load, part):
    assert part in load_words(msgspec.structs.replace(bench(), load=load))


def test_the_json_is_read_back_as_it_was(measured):
    assert msgspec.json.decode(msgspec.json.encode(measured[0]), type=ServeBench) == measured[0]

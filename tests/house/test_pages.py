"""The web pages in a real browser: they stream, stay up to date, open timelines, and ask no other host."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import pytest
from browser import Browser, Page, chromium, missing

from pdactors import Client, Cluster
from pdactors.cli.trace import _content
from pdactors.observe.timeline import Timeline

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(missing()), reason=missing() or "-")]
TOKEN = "open-sesame"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def guarded(start: Any) -> Iterator[Cluster]:
    with start(**{"security.token": TOKEN}) as cluster:
        yield cluster


@pytest.fixture
def home_page(browser: Browser, guarded: Cluster) -> Page:
    """The cluster's page, once its token was typed in."""
    page = browser.open(f"http://{guarded.http}/")
    page.wait("getComputedStyle(document.getElementById('token')).display !== 'none'")
    assert page.run("document.getElementById('content').hidden")
    page.run(f"document.getElementById('token-text').value = '{TOKEN}'")
    page.run("document.querySelector('#token button').click()")
    page.wait("!document.getElementById('content').hidden")
    assert page.run("getComputedStyle(document.getElementById('token')).display") == "none"
    page.errors.clear()  # the first answer was that a token is needed
    return page


def text(page: Page, id: str) -> str:
    return str(page.run(f"document.getElementById('{id}').textContent"))


def test_a_prompt_streams_the_state_follows_and_its_timeline_opens(
    home_page: Page, guarded: Cluster, tmp_path: Path
) -> None:
    page = home_page
    for name in ("router", "gateway", "n0/prefill-0", "n0/decode-0"):
        assert name in text(page, "actors")
    page.run("document.getElementById('prompt').value = '^'")
    page.run("document.getElementById('is-chat').checked = false")
    page.run("document.getElementById('max-tokens').value = 1500")
    page.run("""new MutationObserver(() => {
        window.seen = [...(window.seen || []), document.getElementById("answer").textContent.length];
    }).observe(document.getElementById("answer"), {childList: true, subtree: true})""")
    page.run("document.getElementById('send').click()")
    page.wait("Math.max(...rates.tokens) > 0", 60.0)
    page.wait("!!document.getElementById('timeline-link')", 120.0)
    assert text(page, "answer") == "\n." * 750
    lengths = page.run("window.seen")
    assert len(set(lengths)) > 100
    assert lengths == sorted(lengths)
    assert "1 + 1500 tokens" in text(page, "outcome")
    page.wait("document.querySelectorAll('#recent a').length === 1")
    page.screenshot(tmp_path / "home.png")
    page.run("document.getElementById('timeline-link').click()")
    page.wait("document.title.startsWith('pdactors: request ')")
    assert "1500 tokens" in text(page, "summary")
    assert "decode steps" in text(page, "parts")
    assert "n0/decode-0" in text(page, "clocks")
    page.screenshot(tmp_path / "timeline.png")
    _look_closer(page)
    assert page.errors == []
    assert {urlsplit(url).netloc for url in page.urls} == {guarded.http}


def _look_closer(page: Page) -> None:
    """Hold that hovering tells of a decode step, and that the wheel zooms."""
    box = page.run(
        "(r => [r.left, r.top, r.width, r.height])(document.getElementById('lanes').getBoundingClientRect())"
    )
    left, top, width, height = box
    middle, bottom = left + width * 0.6, top + height - 20
    page.point(middle, bottom)
    page.wait("document.getElementById('tip').style.display === 'block'")
    assert "batch: 1" in text(page, "tip")
    before = page.run("document.getElementById('lanes').toDataURL()")
    page.wheel(middle, bottom, -600)
    page.wait(f"document.getElementById('lanes').toDataURL() !== {before!r}")


def test_an_answer_can_be_stopped_and_an_error_is_shown(home_page: Page, guarded: Cluster) -> None:
    page = home_page
    page.run("document.getElementById('prompt').value = '^'")
    page.run("document.getElementById('is-chat').checked = false")
    page.run("document.getElementById('max-tokens').value = 2000")
    page.run("document.getElementById('send').click()")
    page.wait("document.getElementById('answer').textContent.length > 20", 60.0)
    page.run("document.getElementById('stop').click()")
    page.wait("document.getElementById('outcome').textContent.startsWith('stopped')")
    page.wait("document.getElementById('recent').textContent.includes('cancelled')")
    page.run("document.getElementById('prompt').value = 'the cat '.repeat(3000)")
    page.run("document.getElementById('send').click()")
    page.wait("document.getElementById('outcome').textContent.includes('tokens leave none to generate')")


def test_a_saved_timeline_needs_no_server(browser: Browser, guarded: Cluster, tmp_path: Path) -> None:
    with Client(guarded.zmq, token=TOKEN) as client:
        answer = client.generate("the cat", max_tokens=5, ignore_eos=True)
        timeline = msgspec.convert(client.trace(answer.request), Timeline)
    file = tmp_path / "t.html"
    file.write_text(_content(timeline, ".html"))
    page = browser.open(file.as_uri(), dark=True, width=700)
    page.wait("!document.getElementById('content').hidden")
    assert answer.request in text(page, "title")
    assert page.run("document.documentElement.scrollWidth <= innerWidth")
    assert {urlsplit(url).scheme for url in page.urls} <= {"file", "data"}
    assert page.errors == []

"""The web pages: one HTML file each, with its style and script in it; nothing is loaded from elsewhere."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

import msgspec

from pdactors.observe.timeline import Timeline

# What a server says with a page: it runs its own scripts, asks its own server, and is in no frame.
POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def home_page() -> str:
    """Return the page that shows the cluster; it asks its server for all that it shows."""
    return _page("home")


def timeline_page(timeline: Timeline | None = None) -> str:
    """Return the page of a timeline: with it, to be kept as a file, or one that asks its server for it."""
    data = msgspec.json.encode(timeline).decode().replace("<", "\\u003c")  # so that nothing in it ends the script
    return _page("timeline").replace("/*DATA*/", data)


@cache
def _page(name: str) -> str:
    page = _text(f"{name}.html")
    return page.replace("/*STYLE*/", _text("style.css")).replace("/*ASK*/", _text("ask.js"))


def _text(name: str) -> str:
    return (files(__package__) / name).read_text("utf-8")

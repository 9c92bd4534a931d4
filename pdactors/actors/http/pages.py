"""What a browser is served: the cluster's page, timelines, and the JSON that they ask for.

The pages themselves hold no data, so they need no token; what they ask for does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pdactors.actors import accounts
from pdactors.actors.http.objects import HttpError
from pdactors.actors.http.scrape import Scraper
from pdactors.errors import BadRequest
from pdactors.observe.chrome_trace import chrome_trace
from pdactors.observe.pages import POLICY, home_page, timeline_page

if TYPE_CHECKING:
    from pdactors.actors.gateway import Gateway

NUM_RECENT = 15
JSON = "application/json"


def is_page(path: str) -> bool:
    """Say whether a path is that of a page without data."""
    return path == "/" or path.startswith("/trace/")


class Pages:
    """The routes below `/` that are not OpenAI's."""

    def __init__(self, gateway: Gateway, scraper: Scraper) -> None:
        self._gateway = gateway
        self._scraper = scraper
        self.routes = [
            Route("/", self._home, methods=["GET"]),
            Route("/status", self._status, methods=["GET"]),
            Route("/timeline/{request:path}", self._timeline, methods=["GET"]),
            Route("/trace/{request:path}", self._trace, methods=["GET"]),
        ]

    async def _home(self, _request: Request) -> Response:
        return _page(home_page())

    async def _trace(self, _request: Request) -> Response:
        return _page(timeline_page())

    async def _status(self, _request: Request) -> Response:
        """Answer what `pdactors status --json` prints, why nothing could be served now, and the last requests."""
        spec, survey = self._gateway.spec, await self._scraper.survey()
        if survey is None:
            raise HttpError(503, "the router is not there", code="service_unavailable", headers={"retry-after": "1"})
        status = accounts.status(spec.run_id, spec.config.cluster.mode, spec.model.name, survey)
        recent = self._gateway.tracer.recent(NUM_RECENT)
        return _json({**status, "obstacle": self._gateway.obstacle(), "recent": recent})

    async def _timeline(self, request: Request) -> Response:
        """Answer a timeline, with `?form=chrome` in Chrome's trace format."""
        try:
            found = await self._gateway.tracer.timeline(request.path_params["request"])
        except BadRequest as error:
            raise HttpError(404, error.message, code="not_found") from error
        return _json(chrome_trace(found) if request.query_params.get("form") == "chrome" else found)


def _page(text: str) -> Response:
    headers = {"content-security-policy": POLICY, "cache-control": "no-cache", "x-content-type-options": "nosniff"}
    return Response(text, headers=headers, media_type="text/html")


def _json(content: object) -> Response:
    return Response(msgspec.json.encode(content), headers={"cache-control": "no-store"}, media_type=JSON)

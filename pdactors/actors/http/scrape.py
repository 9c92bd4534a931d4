"""`Scraper`: what `/metrics` answers, from our own counts and fresh reports of every actor, which pages show, too."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from pdactors.actors.actor import ROUTER
from pdactors.errors import RequestTimeout
from pdactors.messages import Surveyed

if TYPE_CHECKING:
    from pdactors.actors.gateway import Gateway

SURVEY_TIMEOUT_S = 4.0  # Prometheus waits 10 s


class Scraper:
    """Asks the cluster at most once at a time: whoever comes while others wait gets what they get."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._asking: asyncio.Task[Surveyed | None] | None = None

    async def scrape(self) -> bytes:
        """Return the figures of the cluster; without the router there are our own."""
        metrics = self._gateway.metrics
        assert metrics is not None
        survey = await self.survey()
        reports, silent = (survey.reports, survey.silent) if survey else ((), (ROUTER,))
        return await asyncio.to_thread(metrics.expose, reports, silent)  # some milliseconds

    async def survey(self) -> Surveyed | None:
        """Return fresh reports; None where the router is not there."""
        if not self._gateway.has_router:
            return None
        if self._asking is None:
            self._asking = self._gateway.spawn(self._ask())
        return await asyncio.shield(self._asking)

    async def _ask(self) -> Surveyed | None:
        try:
            return await self._gateway.survey(SURVEY_TIMEOUT_S)
        except RequestTimeout:
            return None
        finally:
            self._asking = None

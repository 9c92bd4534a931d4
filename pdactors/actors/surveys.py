"""`Surveys`: the router asks every actor to report, for the gateway, and waits a second for the answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from pdactors.actors.spec import ENGINES
from pdactors.messages import Inspect, Inspected, Member, Report, Surveyed

if TYPE_CHECKING:
    from pdactors.actors.router import Router

SURVEY_TIMEOUT_S = 1.0


@dataclass
class Survey:
    """An Inspect under way: who has not answered yet."""

    asker: str
    query: int
    asked_s: float
    missing: set[str]
    reports: list[Report] = field(default_factory=list)


class Surveys:
    """Owns the surveys under way."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._under_way: dict[int, Survey] = {}
        self._num_asked = 0
        router.accept(Inspect, self._on_survey, "gateway")
        router.accept(Inspected, self._on_inspected, "gateway", "migrator", *ENGINES)

    def mind(self, now: float) -> None:
        """Answer with what there is where some do not."""
        for survey in [s for s in self._under_way.values() if now - s.asked_s > SURVEY_TIMEOUT_S]:
            self._finish(survey)

    def _on_survey(self, sender: Member, message: Inspect) -> None:
        router = self._router
        self._num_asked += 1
        asked = {name for name, member in router.members.items() if member.role != "supervisor"}
        own = msgspec.structs.replace(router.report(), stamps=router.trail.of(message.request))
        survey = Survey(sender.name, message.query, router.clock(), set(asked), [own])
        self._under_way[self._num_asked] = survey
        for name in asked:
            router.tell(name, Inspect(self._num_asked, message.request))

    def _on_inspected(self, sender: Member, message: Inspected) -> None:
        survey = self._under_way.get(message.query)
        if survey is None or sender.name not in survey.missing:
            return self._router.drop("late report", sender=sender.name)
        survey.missing.discard(sender.name)
        survey.reports.append(message.report)
        return self._finish(survey) if not survey.missing else None

    def _finish(self, survey: Survey) -> None:
        router, now = self._router, self._router.clock()
        self._under_way = {key: other for key, other in self._under_way.items() if other is not survey}
        clocks = {name: clock for name in router.members if (clock := router.clocks.of(name, now)) is not None}
        in_flight, silent = tuple(router.dispatcher.requests), tuple(sorted(survey.missing))
        router.tell(survey.asker, Surveyed(survey.query, tuple(survey.reports), in_flight, silent, clocks))

"""Worker: computes prompts and decodes them itself (modes colocated and chunked); the step planner does the rest."""

from __future__ import annotations

from pdactors.actors.engine import EngineActor
from pdactors.actors.spec import ActorSpec
from pdactors.engine.model import PagedModel
from pdactors.messages import Prefill
from pdactors.transport import Transport


class WorkerActor(EngineActor):
    role = "worker"

    def __init__(self, spec: ActorSpec, transport: Transport, model: PagedModel) -> None:
        super().__init__(spec, transport, model)
        self.accept(Prefill, self.take_prompt, "router")

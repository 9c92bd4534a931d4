"""The gateway: client sockets, and all text. It tokenises once, detokenises, and finds stop strings.

Engines send it tokens, one message per step; the router hears of state changes only.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from pdactors.actors import accounts
from pdactors.actors.actor import ROUTER, Actor
from pdactors.actors.answer import Answer, Sink
from pdactors.actors.client_server import ClientServer
from pdactors.actors.line_server import LineServer
from pdactors.actors.process import return_memory
from pdactors.actors.prompt import tokenise
from pdactors.actors.spec import ActorSpec
from pdactors.actors.tracing import Tracer
from pdactors.client_messages import ErrorEvent, RequestBody, RequestId
from pdactors.errors import (
    BadRequest,
    Overloaded,
    PDError,
    PromptTooLong,
    RequestTimeout,
    WorkerLost,
    error_for,
)
from pdactors.messages import (
    Answered,
    Cancel,
    DrainActor,
    FinishReason,
    Fleet,
    Generate,
    Inspect,
    Load,
    Member,
    Message,
    Rejected,
    Release,
    Report,
    Resume,
    Role,
    Scale,
    Surveyed,
    Token,
    Tokens,
)
from pdactors.policy.retries import MAX_ATTEMPTS
from pdactors.text.tokenizer import Tokenizer
from pdactors.token_ids import TokenIds
from pdactors.transport import Transport

if TYPE_CHECKING:
    from pdactors.actors.http.server import HttpServer
    from pdactors.observe.metrics import Metrics

LONG_TEXT = 20_000  # characters that are tokenised aside, so that the loop goes on
MAX_TEXT_ASIDE = 32 << 20  # characters that wait to be tokenised aside
ROUTER_GONE_S = 4.0  # more than its restart takes; what stands still is ended then
ROUTER_GRACE_S = 5.0  # what the router gets beyond a request's own limit to say that it is over
ASK_TIMEOUT_S = 15.0  # more than a fork of an engine takes
SWEEP_S = 0.5
LOOK_AGAIN_S = 0.5  # after a first finding, which may just be on its way back


class Gateway(Actor):
    role = "gateway"

    def __init__(self, spec: ActorSpec, transport: Transport) -> None:
        super().__init__(spec, transport)
        self.answers: dict[str, Answer] = {}
        self.tracer = Tracer(self)
        self.token = spec.config.security.client_token()
        self.tokenizer: Tokenizer | None = None
        self._questions: dict[int, asyncio.Future[Surveyed | Answered]] = {}
        self._num_questions = self._text_aside = 0
        self._news_s = 0.0  # when the router was last heard
        self._lines = LineServer(self)
        self._clients = ClientServer(self)
        self._http: HttpServer | None = None
        self.metrics: Metrics | None = None  # nobody could read them without HTTP
        self.accept(Tokens, self._on_tokens, "prefill", "decode", "worker")
        self.accept(Resume, self._on_resume, "router")
        self.accept(Rejected, self._on_rejected, "router")
        self.accept(Surveyed, self._on_answer, "router")
        self.accept(Answered, self._on_answer, "router")

    # ---- Life --------

    def open(self) -> None:
        self.listen(self.spec.own_address())
        super().open()

    async def start(self) -> None:
        self.tokenizer = await asyncio.to_thread(Tokenizer, Path(self.spec.model.folder))
        if self.spec.fds.tcp >= 0:
            await self._lines.start(self.spec.fds.tcp)
        if self.spec.fds.zmq >= 0:
            self._clients.start(self.spec.config.listen.zmq, self.spec.fds.zmq)
        if self.spec.fds.http >= 0:
            from pdactors.actors.http.server import HttpServer  # a fifth of a second that only its users pay
            from pdactors.observe.metrics import Metrics

            self.metrics = Metrics(self.spec.model.name, self.spec.name, self.spec.node, self.spec.layout.token_bytes)
            self._http = HttpServer(self)
            await self._http.start(self.spec.fds.http)
        self.every(SWEEP_S, self._sweep)
        self.every(5.0, return_memory)  # that long texts needed

    async def close(self) -> None:
        for answer in list(self.answers.values()):
            self._fail(answer, Overloaded("the cluster is shutting down", retry_after_s=5.0))
        await self._lines.close()
        if self._http is not None:
            await self._http.close()
        self._clients.close()

    def router_changed(self) -> None:
        """Ask the new router for what is left of every answer; engines let go of what the lost one had them do."""
        for answer in [answer for answer in self.answers.values() if answer.ask is not None]:
            assert answer.ask is not None
            if answer.attempt >= MAX_ATTEMPTS:
                self._fail(answer, WorkerLost(f"the router was lost in attempt {answer.attempt}"))
                continue
            self.tell(ROUTER, Cancel(answer.request))  # it may have come between the new one's start and its word
            generated = answer.resume(answer.attempt + 1)
            self.tell(ROUTER, msgspec.structs.replace(answer.ask, attempt=answer.attempt, generated=generated))

    def _on_fleet(self, sender: Member, fleet: Fleet) -> None:
        self._news_s = self.clock()
        super()._on_fleet(sender, fleet)

    def load(self) -> Load:
        return Load(running=len(self.answers))

    def report(self) -> Report:
        return msgspec.structs.replace(super().report(), requests=tuple(self.answers))

    # ---- What could be served, for the client sockets --------

    @property
    def is_ending(self) -> bool:
        """Whether nothing new is taken because the run is about to end."""
        return self.fleet.is_draining or self.state == "stopping"

    @property
    def has_router(self) -> bool:
        """Whether the router was heard of late."""
        return ROUTER in self._hosts and self.clock() - self._news_s < self.spec.config.router.dead_after_ms / 1000

    def obstacle(self) -> str:
        """Say why a request could not be served now; "" if it could."""
        if self.is_ending:
            return "the cluster is shutting down"
        if not self.has_router:
            return "the router is not there"
        ready = {member.role for member in self.fleet.members if member.state == "ready"}
        needed: set[Role] = {"prefill", "decode"} if self.spec.config.is_separated else {"worker"}
        if missing := sorted(needed - ready):
            return f"no {' and no '.join(missing)} actor is ready"
        if self.fleet.num_queued >= self.spec.config.router.max_queue:
            return f"{self.fleet.num_queued} requests are waiting (router.max_queue)"
        return ""

    # ---- Requests, for the client sockets --------

    def submit(self, body: RequestBody, id: RequestId | None, sink: Sink) -> str:
        """Take a request; its events, an `error` or a `done` at last, go to `sink`. Returns the key for `cancel`."""
        answer = Answer(secrets.token_hex(8), id, body, sink, self.clock())
        self.answers[answer.request] = answer
        self.tracer.received(answer)
        if self.fleet.is_draining:
            self._fail(answer, Overloaded("the cluster is shutting down", retry_after_s=5.0))
            return answer.request
        if len(body.prompt or "") > LONG_TEXT or body.messages:
            if self._text_aside > MAX_TEXT_ASIDE:
                self._fail(answer, Overloaded("too many prompts wait to be tokenised", retry_after_s=1.0))
            else:
                self._text_aside += body.num_characters
                self.spawn(self._submit_aside(answer))
        else:
            self._forward(answer, lambda: self._tokenise(body))
        return answer.request

    def cancel(self, request: str) -> None:
        """End a request; unknown or finished ones are fine."""
        answer = self.answers.get(request)
        if answer is not None:
            self.tell(ROUTER, Cancel(request))
            self._finish(answer, "cancelled")

    async def ask(self, what: str) -> dict[str, Any]:
        """Answer `status` or `leaks` from fresh reports of every actor, or `requests` from what is known here.

        Raises:
            RequestTimeout: the router does not answer.
        """
        if what == "requests":
            return {"requests": self.tracer.recent()}
        found = await self.survey()
        if what == "leaks":
            leaks = accounts.leaks(found)
            if not accounts.is_clean(leaks):
                await asyncio.sleep(LOOK_AGAIN_S)
                leaks = accounts.lasting(leaks, accounts.leaks(await self.survey()))
            return leaks
        return accounts.status(self.spec.run_id, self.spec.config.cluster.mode, self.spec.model.name, found)

    async def survey(self, timeout_s: float = ASK_TIMEOUT_S, request: str = "") -> Surveyed:
        """Have every actor report, and tell of a request; raises RequestTimeout where the router does not answer."""
        found = await self._question(lambda query: Inspect(query, request), timeout_s)
        assert isinstance(found, Surveyed)
        return found

    async def trace(self, request: str) -> dict[str, Any]:
        """Return a request's timeline; takes and raises what `Tracer.timeline` does."""
        found: dict[str, Any] = msgspec.to_builtins(await self.tracer.timeline(request))
        return found

    async def drain(self, actor: str) -> dict[str, Any]:
        """Have an engine drained; raises BadRequest where it cannot be, and what `ask` raises."""
        return self._outcome(await self._question(lambda query: DrainActor(query, actor)))

    async def scale(self, node: str, role: Role, count: int) -> dict[str, Any]:
        """Have engines started or drained; raises what `drain` raises."""
        return self._outcome(await self._question(lambda query: Scale(query, node, role, count)))

    async def _question(self, make: Callable[[int], Message], timeout_s: float = ASK_TIMEOUT_S) -> Surveyed | Answered:
        """Ask the router, and wait for its answer at most `timeout_s`."""
        self._num_questions += 1
        question = self._num_questions
        future: asyncio.Future[Surveyed | Answered] = asyncio.get_running_loop().create_future()
        self._questions[question] = future
        self.tell(ROUTER, make(question))
        try:
            async with asyncio.timeout(timeout_s):
                return await future
        except TimeoutError:
            raise RequestTimeout(f"the router did not answer within {timeout_s:.0f} s") from None
        finally:
            del self._questions[question]

    def _outcome(self, answer: Surveyed | Answered) -> dict[str, Any]:
        assert isinstance(answer, Answered)
        if answer.error:
            raise BadRequest(answer.error)
        return {"started": list(answer.started), "draining": list(answer.draining)}

    # ---- From text to tokens --------

    async def _submit_aside(self, answer: Answer) -> None:
        try:
            prompt = await asyncio.to_thread(self._tokenise, answer.body)
        except PDError as error:
            self._fail(answer, error)
            return
        except Exception as error:  # the request ends with it, the gateway goes on
            self.log.exception("tokenising failed", request=answer.request)
            self._fail(answer, PDError(f"tokenising failed: {error}"))
            return
        finally:
            self._text_aside -= answer.body.num_characters
        if answer.request in self.answers:  # it may have been cancelled meanwhile
            self._forward(answer, lambda: prompt)

    def _forward(self, answer: Answer, make: Callable[[], tuple[int, ...]]) -> None:
        """Send a request to the router, or end it with the reason."""
        body = answer.body
        try:
            assert self.tokenizer is not None
            prompt = make()
            room = self.spec.model.max_model_len - len(prompt)
            if room < 1:
                raise PromptTooLong(
                    f"prompt: {len(prompt)} tokens leave none to generate within model.max_model_len "
                    f"{self.spec.model.max_model_len}"
                )
            if body.min_tokens > body.max_tokens:
                raise BadRequest(f"min_tokens: {body.min_tokens} is more than max_tokens {body.max_tokens}")
        except PDError as error:
            self._fail(answer, error)
            return
        deadline_s = answer.arrived_s + body.deadline_ms / 1000 if body.deadline_ms is not None else None
        sampling = body.sampling(min(body.max_tokens, room))
        ask = Generate(answer.request, TokenIds.of(prompt), sampling, body.priority, deadline_s, body.save_final_kv)
        answer.begin(self.tokenizer, ask)
        self.tracer.tokenised(answer)
        self.tell(ROUTER, ask)

    def _tokenise(self, body: RequestBody) -> tuple[int, ...]:
        assert self.tokenizer is not None
        return tokenise(self.tokenizer, body, self.spec.model.vocab_size)

    # ---- From tokens to text --------

    def _on_tokens(self, sender: Member, message: Tokens) -> None:
        now = self.clock()
        for token in message.tokens:
            answer = self.answers.get(token.request)
            if answer is None or token.attempt < answer.attempt:  # the router's word may not have reached the engine
                self.tell(sender.name, Release(token.request, token.attempt))
                self.drop("late token", request=token.request, index=token.index)
                continue
            try:
                self._take(answer, token, now)
            except Exception as error:  # one answer's text must not cost the others of the step
                self.log.exception("token failed", request=token.request)
                self.tell(ROUTER, Cancel(token.request))
                self._fail(answer, PDError(f"{self.spec.name}: {error}"))

    def _take(self, answer: Answer, token: Token, now: float) -> None:
        assert self.tokenizer is not None
        num_tokens, last_s = answer.num_tokens, answer.last_s
        if not answer.take(token, self.tokenizer, now):
            return self.drop("late token", request=token.request, index=token.index)
        num_new = answer.num_tokens - num_tokens
        self.tracer.written(answer, num_new)
        if self.metrics is not None:
            self.metrics.tokens(num_new, now - (last_s or answer.arrived_s), None if last_s else answer.prompt_use)
        if answer.finish is not None:
            if token.finish is None:  # a stop string: the engine does not know yet
                self.tell(ROUTER, Cancel(token.request))
            self._finish(answer, answer.finish)
        return None

    def _on_resume(self, _sender: Member, message: Resume) -> None:
        """Say how far an answer is, so that it goes on from there."""
        answer = self.answers.get(message.request)
        if answer is None:  # it ended with what came last
            self.tell(ROUTER, Cancel(message.request))
        elif message.attempt < answer.attempt:
            self.drop("late resumption", request=message.request)
        else:
            self.tell(ROUTER, Resume(message.request, message.attempt, answer.resume(message.attempt)))

    def _on_rejected(self, _sender: Member, message: Rejected) -> None:
        answer = self.answers.get(message.request)
        if answer is None:
            return self.drop("late rejection", request=message.request)
        return self._fail(answer, error_for(message.code, message.message, message.retry_after_s))

    def _on_answer(self, _sender: Member, message: Surveyed | Answered) -> None:
        future = self._questions.get(message.query)
        if future is None or future.done():
            return self.drop("late answer")
        return future.set_result(message)

    # ---- Endings --------

    def _finish(self, answer: Answer, finish: FinishReason) -> None:
        """End an answer; one that its client left while a token was written is over already."""
        if self.answers.pop(answer.request, None) is None:
            return
        now = self.clock()
        done = answer.done(finish, now)
        self.tracer.done(answer, done, now)
        if self.metrics is not None:
            self.metrics.ended(done)
        self.log.info(
            "request done",
            request=answer.request,
            id=answer.id,
            finish_reason=finish,
            **msgspec.to_builtins(done.usage),
            **msgspec.to_builtins(done.timing),
            path=done.path,
            path_reason=done.path_reason,
            codec=done.codec,
            pruned_tokens=done.pruned_tokens,
        )
        answer.sink(done)

    def _fail(self, answer: Answer, error: PDError) -> None:
        if self.answers.pop(answer.request, None) is None:
            return
        self.tracer.failed(answer, error)
        if self.metrics is not None:
            self.metrics.failed(error.code)
        self.log.info("request failed", request=answer.request, id=answer.id, code=error.code, reason=error.message)
        answer.sink(ErrorEvent.of(answer.id, error))

    def _sweep(self) -> None:
        """End what the router should have ended long ago, and what stands still while there is no router."""
        limit_s = self.spec.config.router.request_timeout_s + ROUTER_GRACE_S
        now = self.clock()
        is_alone = now - self._news_s > ROUTER_GONE_S
        for answer in list(self.answers.values()):
            if now - answer.arrived_s > limit_s:
                self.tell(ROUTER, Cancel(answer.request))
                self._fail(answer, RequestTimeout(f"no end after {limit_s:.0f} s"))
            elif is_alone and now - max(answer.arrived_s, answer.last_s) > ROUTER_GONE_S:
                self._fail(answer, WorkerLost(f"the router has been lost for {now - self._news_s:.0f} s"))

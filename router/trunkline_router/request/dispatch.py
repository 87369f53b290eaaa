"""Dispatches prepared requests to workers, and moves a request to another worker if its own fails."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Sequence
from functools import partial
from itertools import islice
from types import TracebackType
from typing import NoReturn

from trunkline.answer.answer_parser import parsers_of
from trunkline.ledger import AnswerLedger, Ledger
from trunkline.names import finish_name
from trunkline.status import CODE_RESOURCE_EXHAUSTED, NO_WORKER, OVERLOADED, RequestRefused, code_of
from trunkline.v1.inference_pb2 import GenerateResponse
from trunkline.v1.worker_pb2 import Submit, Timeline
from trunkline_router.quotas.reservation import OutputMeter
from trunkline_router.record.request_record import COMPLETE, PLACEMENT, UNKNOWN, WORKER, AttemptRecord, RequestRecord
from trunkline_router.request.failover import GONE_WITHIN_S, Suspicion, quarantined
from trunkline_router.request.input_window import InputWindow
from trunkline_router.request.placement import Dispatcher, Placement
from trunkline_router.request.request_call import PreparedRequest, TimeLeft
from trunkline_router.request.request_stream import BrokenOff, RequestStream
from trunkline_router.routing.route import Route
from trunkline_router.workers.connected_worker import ConnectedWorker
from trunkline_router.workers.output_claims import believed_timeline, clock_skew_s
from trunkline_runtime.log import get_logger
from trunkline_runtime.telemetry.trace_context import TraceContext, new_span_id

MOST_PROBLEM = 200  # characters: some are a worker's words


class DispatchedRequest:
    """One request on its way. `stream` holds the output of its workers so far."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        prepared: PreparedRequest,
        time_left: TimeLeft,
        record: RequestRecord,
        meter: OutputMeter,
    ) -> None:
        self.parsers = parsers_of(prepared.answer_format, prepared.choices, prepared.answer_context)
        self.stream = RequestStream(
            record,
            prepared.choices,
            prepared.prompt_info(),
            dispatcher.fanout,
            dispatcher.backlog,
            meter,
            parsers=self.parsers,
        )
        self._dispatcher = dispatcher
        self._prepared = prepared
        self._record = record
        self._suspicion = Suspicion(dispatcher.cells)
        self._window = InputWindow()
        self._killed: list[ConnectedWorker] = []  # workers that reported a death in a step of it
        self._placement = Placement(
            dispatcher, prepared, time_left, self.stream.answer, record, suspicion=self._suspicion
        )

    async def responses(self) -> AsyncGenerator[GenerateResponse, None]:
        """Yields the responses, and fills in the request's record. Raises RequestRefused."""
        stream, record, dispatcher = self.stream, self._record, self._dispatcher
        dispatcher.budget.on_request()
        record.stage = PLACEMENT
        try:
            while True:
                route = await self._placed()
                timeout_ns = self._placement.timeout_ns()
                try:
                    with WorkerAttempt(route, dispatcher, self._suspicion, record, stream.answer) as attempt:
                        self._submit(attempt, route.worker, timeout_ns)
                        noted = attempt.noted
                        while (response := await stream.take()) is not None:
                            noted.last_output_s = stream.handed_s
                            if noted.first_output_s is None:
                                self._has_started(attempt)
                            if self._prepared.inputs:
                                self._send_more(attempt)
                            yield response
                        noted.ended = COMPLETE
                    break
                except BrokenOff as broken:
                    await self._note(route.worker, broken)
            reasons = [finish_name(ledger.finish_reason) for ledger in stream.answer.ledgers]
            record.outcome = ",".join(dict.fromkeys(reasons))
        finally:
            stream.close()
            record.cached_tokens, record.completion_tokens = stream.cached_tokens, stream.answer.completion_tokens
            record.longest_choice_tokens = max([ledger.num_tokens for ledger in stream.answer.ledgers])

    async def _placed(self) -> Route[ConnectedWorker]:
        """Returns a route to a worker that this request may go to. Raises RequestRefused."""
        self._check_convictions()
        route = await self._placement.place()
        self._check_convictions()  # another copy of the request may have been convicted meanwhile
        return route

    def _check_convictions(self) -> None:
        """Raises RequestRefused (QUARANTINED)."""
        dispatcher, prepared = self._dispatcher, self._prepared
        now_s, are_inputs = dispatcher.clock_s(), bool(prepared.inputs)
        dispatcher.quarantine.check_all(prepared.computations(), now_s, are_inputs=are_inputs)

    def _submit(self, attempt: "WorkerAttempt", worker: ConnectedWorker, timeout_ns: int | None) -> None:
        """Begins an attempt: sends the unfinished choices to the worker, or the first ones of many inputs."""
        stream, suspicion = self.stream, self._suspicion
        choices = list(stream.answer.unfinished())
        if self._prepared.inputs:
            most_waiting = worker.model.max_waiting_requests
            choices = self._window.begin(choices, most_waiting, one_by_one=suspicion.is_suspect)
            done = zip(self._prepared.inputs, stream.answer.ledgers, strict=True)
            attempt.has_computed(sum([len(one.ids) for one, ledger in done if ledger.finished]))
        submits = self._submits(choices, attempt, timeout_ns)
        if suspicion.is_suspect:
            suspicion.enter(worker)
        stream.begin(worker.model.worker_id, attempt)
        attempt.submit(submits, stream)

    def _send_more(self, attempt: "WorkerAttempt") -> None:
        """Sends further inputs in place of those that are answered. Raises RequestRefused at the deadline."""
        stream, window, suspicion = self.stream, self._window, self._suspicion
        if suspicion.is_suspect and not window.has_suspects(stream.answer):
            suspicion.clear()
        choices = window.next(
            stream.answer.num_unfinished, num_untaken=stream.num_untaken, one_by_one=suspicion.is_suspect
        )
        if choices and not stream.is_broken:
            attempt.submit(self._submits(choices, attempt, self._placement.timeout_ns()), stream)

    def _submits(
        self, choices: Sequence[tuple[int, Ledger]], attempt: "WorkerAttempt", timeout_ns: int | None
    ) -> list[Submit]:
        return self._prepared.submits(
            choices,
            timeout_ns=timeout_ns,
            trace=trace_of(self._record, attempt.noted.span_id),
            previous_traceparent=attempt.previous_traceparent,
            prompt_known=self.stream.answer.prompt_known,
            suspect=self._suspicion.is_suspect,
        )

    def _has_started(self, attempt: "WorkerAttempt") -> None:
        """The first response of an attempt was handed on. The hits of several inputs tell nothing of the first one's,
        for which its worker was chosen, and the others still queue."""
        stream = self.stream
        attempt.started(stream.handed_s)
        if not self._prepared.inputs:
            attempt.has_computed_all(stream.cached_tokens)
            self._placement.has_computed(stream.cached_tokens)

    async def _note(self, worker: ConnectedWorker, broken: BrokenOff) -> None:
        """An attempt broke off. Raises RequestRefused if it was the last one."""
        stream, refused = self.stream, broken.refused
        if broken.suspect:
            self._killed.append(worker)
            self._window.suspect(stream.answer)
            if self._suspicion.on_death(sole_suspect=broken.sole_suspect) and await self._are_gone():
                self._convict()
        if refused.reason == OVERLOADED:
            self._window.was_refused()
        self._placement.on_lost(worker, refused)
        if not stream.answer.has_output:
            problem = "trying another worker"
        else:
            problem = "continuing on another worker"
            stream.resumptions += 1
        noted = self._record.attempts[-1]
        get_logger().warning(problem, **self._record.log_fields(), problem=noted.problem,
                             tokens=stream.answer.completion_tokens, suspect=broken.suspect)  # fmt: skip

    async def _are_gone(self) -> bool:
        """Whether the workers that report being killed by the request are gone, after a short wait."""
        dispatcher, killed = self._dispatcher, self._killed[-2:]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GONE_WITHIN_S):
                while not all(worker.session.is_broken for worker in killed):
                    await dispatcher.pools.change().wait()
        alive = [worker.address for worker in killed if not worker.session.is_broken]
        if not alive:
            return True
        get_logger().error("workers report that a request killed them, but they are still connected",
                           **self._record.log_fields(), workers=sorted({worker.address for worker in killed}),
                           alive=alive)  # fmt: skip
        return False

    def _convict(self) -> NoReturn:
        """Quarantines the request. Raises RequestRefused (QUARANTINED)."""
        dispatcher, workers = self._dispatcher, [worker.address for worker in self._killed[-2:]]
        # Of several inputs, the first unfinished one was at the worker alone.
        index = next(self.stream.answer.unfinished())[0] if self._prepared.inputs else None
        computation = next(islice(self._prepared.computations(), index or 0, None))
        everywhere = dispatcher.quarantine.convict(computation, set(workers), dispatcher.clock_s())
        get_logger().error("request quarantined", **self._record.log_fields(), workers=workers, everywhere=everywhere)
        raise quarantined(index)


class WorkerAttempt:
    """A request's attempt at the worker of a route: a context. However the context closes, the worker is told and its
    load is settled.

    What the stream calls acts at once, because the generator of responses stands still until the client reads on.
    """

    def __init__(
        self,
        route: Route[ConnectedWorker],
        dispatcher: Dispatcher,
        suspicion: Suspicion,
        record: RequestRecord,
        answer: AnswerLedger,
    ) -> None:
        self.noted, self.previous_traceparent = begin_attempt(record, route.worker, answer)
        self.is_watched = suspicion.is_suspect  # whether progressed() is called
        self._worker = route.worker
        self._suspicion = suspicion
        self._record = record
        self._clock_s = dispatcher.clock_s
        self._is_told_cached = not answer.prompt_known
        self._handles: list[int] = []  # of its submits
        self._trial = route.worker.breaker.dispatch()
        self._flight = route.in_flight()

    def __enter__(self) -> "WorkerAttempt":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, BrokenOff):
            self._note_loss(error.refused)
        self._trial.end()
        self._abort()
        self._suspicion.leave()
        self._flight.end()
        self.noted.ended_s = time.monotonic()

    def submit(self, submits: Sequence[Submit], stream: RequestStream) -> None:
        """Sends the choices to the worker."""
        sinks = [stream.sink(submit) for submit in submits]
        self._handles += self._worker.session.submit(submits, sinks)

    def started(self, first_output_s: float) -> None:
        """The first response of this attempt was handed on."""
        self.noted.first_output_s = first_output_s
        self._trial.succeeded(self._clock_s())

    def has_computed(self, tokens: int) -> None:
        """Of several inputs, some with so many tokens are computed."""
        self._flight.has_computed(tokens)

    def has_computed_all(self, cached_tokens: int) -> None:
        """The prompt is computed, but for the tokens that its worker had in its cache."""
        self._flight.has_started(cached_tokens if self._is_told_cached else None)

    def progressed(self, steps: int) -> None:
        """The attempt has produced output in `steps` steps, per choice on average."""
        self._suspicion.on_progress(steps)

    def gave_up(self) -> None:
        """The client has fallen too far behind."""
        self.broke_off()
        self._record.outcome, self._record.code = OVERLOADED, CODE_RESOURCE_EXHAUSTED

    def broke_off(self) -> None:
        """The worker has ended the attempt."""
        self._abort()
        self._flight.end()
        self._suspicion.broke_off()

    def choice_ended(self, timeline: Timeline) -> None:
        """A choice has ended at the worker, which says this of it, unchecked."""
        noted = self.noted
        note_timeline(self._record, noted, timeline)
        believed = noted.timelines[-1]
        if len(self._handles) == 1 and noted.first_output_s is not None and believed.HasField("first_token_s"):
            self._worker.steps.took(noted.first_output_s - noted.started_s - believed.first_token_s)

    def _abort(self) -> None:
        """Has the worker end the choices that it still computes."""
        record = self._record
        record.awaited += self._worker.session.abort(self._handles, partial(note_aborted, record, self.noted))

    def _note_loss(self, refused: RequestRefused) -> None:
        """Notes why the worker was lost."""
        noted, worker = self.noted, self._worker
        noted.ended = refused.reason if code_of(refused.reason) is not None else UNKNOWN
        # Messages of other reasons may quote the request.
        noted.problem = refused.message[:MOST_PROBLEM] if refused.reason == NO_WORKER else noted.ended
        # The link counts a lost worker once, and a worker that drains or hangs has not failed.
        if worker.accepts and not worker.session.is_broken:
            self._trial.refused(refused.reason, self._clock_s())


def begin_attempt(record: RequestRecord, worker: ConnectedWorker, answer: AnswerLedger) -> tuple[AttemptRecord, str]:
    """Notes that the request goes to this worker. Returns the note, and the traceparent of the attempt before, "" if
    there is none."""
    previous = trace_of(record, record.attempts[-1].span_id).traceparent if record.attempts else ""
    noted = AttemptRecord(
        worker.model.worker_id,
        time.monotonic(),
        span_id=new_span_id(),
        resumed_at_tokens=answer.completion_tokens if answer.has_output else None,
        price_per_hour=worker.model.price_per_hour,
    )
    record.note_attempt(noted)
    record.stage = WORKER
    return noted, previous


def trace_of(record: RequestRecord, span_id: int) -> TraceContext:
    """The context that a worker gets: of the span of its attempt."""
    return TraceContext(record.trace_id, span_id, record.is_sampled, record.tracestate)


def note_timeline(record: RequestRecord, noted: AttemptRecord, timeline: Timeline) -> None:
    """Notes what the attempt's worker says of a choice that has just ended there."""
    now_s = time.monotonic()
    noted.clock_skew_s = clock_skew_s(timeline, record.unix_ns(noted.started_s) / 1e9, now_s - noted.started_s)
    end_s = now_s if noted.ended_s is None else noted.ended_s
    believed = believed_timeline(timeline, end_s - noted.started_s, record.prompt_tokens)
    believed.received.FromNanoseconds(record.unix_ns(end_s - believed.ended_s))
    noted.note_timeline(believed, keeps_few=bool(record.inputs))


def note_aborted(record: RequestRecord, noted: AttemptRecord, timeline: Timeline | None) -> None:
    """Notes what the worker says of a choice that was aborted; None: it says nothing. Does nothing if the listeners
    were told without it."""
    if not record.awaited:
        return
    if timeline is not None:
        note_timeline(record, noted, timeline)
    record.heard()

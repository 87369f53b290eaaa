"""One worker's attempt to answer a request: what it does, and what is noted of it in the request's record."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType

from trunkline.ledger import AnswerLedger
from trunkline.status import CODE_RESOURCE_EXHAUSTED, NO_WORKER, OVERLOADED, RequestRefused, code_of
from trunkline.v1.worker_pb2 import Submit, Timeline
from trunkline_router.record.request_record import UNKNOWN, WORKER, AttemptRecord, RequestRecord
from trunkline_router.request.request_stream import BrokenOff
from trunkline_router.request.suspicion import Suspicion
from trunkline_router.routing.route import Route
from trunkline_router.workers.claims import believed_timeline, clock_skew_s
from trunkline_router.workers.connected_worker import ConnectedWorker
from trunkline_router.workers.session_outputs import Sink
from trunkline_runtime.telemetry.trace_context import TraceContext, new_span_id

MOST_PROBLEM = 200  # characters: some are a worker's words


class WorkerAttempt:
    """A request's attempt at the worker of a route; an AttemptListener, and a context. However the context closes, the
    worker is told and its load is settled.

    The listener's methods act at once, because the generator of responses stands still until the client reads on.
    """

    def __init__(
        self,
        route: Route[ConnectedWorker],
        suspicion: Suspicion,
        record: RequestRecord,
        answer: AnswerLedger,
        clock_s: Callable[[], float],
    ) -> None:
        self.noted, self.previous_traceparent = begin_attempt(record, route.worker, answer)
        self.is_watched = suspicion.is_suspect
        self.progressed = suspicion.on_progress
        self._worker = route.worker
        self._suspicion = suspicion
        self._record = record
        self._clock_s = clock_s
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

    def submit(self, submits: Sequence[Submit], sink: Sink) -> None:
        """Sends the choices to the worker."""
        self._handles += self._worker.session.submit(submits, [sink] * len(submits))

    def started(self, first_output_s: float, cached_tokens: int) -> None:
        """The first response of this attempt was handed on."""
        self.noted.first_output_s = first_output_s
        self._flight.has_started(cached_tokens if self._is_told_cached else None)
        self._trial.succeeded(self._clock_s())

    def gave_up(self) -> None:
        self.broke_off()
        self._record.outcome, self._record.code = OVERLOADED, CODE_RESOURCE_EXHAUSTED

    def broke_off(self) -> None:
        self._abort()
        self._flight.end()
        self._suspicion.broke_off()

    def choice_ended(self, timeline: Timeline) -> None:
        note_timeline(self._record, self.noted, timeline)

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
    noted.timelines.append(believed)


def note_aborted(record: RequestRecord, noted: AttemptRecord, timeline: Timeline | None) -> None:
    """Notes what the worker says of a choice that was aborted; None: it says nothing. Does nothing if the listeners
    were told without it."""
    if not record.awaited:
        return
    if timeline is not None:
        note_timeline(record, noted, timeline)
    record.heard()

"""Notes in a request's record what becomes of its attempts at workers."""

import time

from trunkline.answer_ledger import AnswerLedger
from trunkline.status import NO_WORKER, RequestRefused, code_of
from trunkline.v1.worker_pb2 import Timeline
from trunkline_router.record.request_record import UNKNOWN, WORKER, AttemptRecord, RequestRecord
from trunkline_router.workers.claims.decode_claims import believed_decode
from trunkline_router.workers.claims.timeline_claims import believed_timeline, clock_skew_s
from trunkline_router.workers.connected_worker import ConnectedWorker
from trunkline_runtime.telemetry.trace_context import TraceContext, new_span_id

MOST_PROBLEM = 200  # characters: some are a worker's words


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
    believed = believed_decode(believed_timeline(timeline, end_s - noted.started_s, record.prompt_tokens))
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


def note_loss(noted: AttemptRecord, refused: RequestRefused) -> None:
    """Notes why the worker was lost."""
    noted.ended = refused.reason if code_of(refused.reason) is not None else UNKNOWN
    # Messages of other reasons may quote the request.
    noted.problem = refused.message[:MOST_PROBLEM] if refused.reason == NO_WORKER else noted.ended


def end_attempt(noted: AttemptRecord, last_output_s: float | None) -> None:
    noted.last_output_s, noted.ended_s = last_output_s, time.monotonic()

"""Begins the record of a request; when it ends, writes its line in the log and tells the listeners."""

import time
from collections.abc import Callable, Sequence
from contextvars import Token
from typing import Any

from trunkline.status import RequestRefused, code_of
from trunkline.v1.worker_pb2 import Timeline
from trunkline_router.record.request_record import CANCELLED, GRANT, MOST_TIMELINES, UNKNOWN, RequestRecord
from trunkline_runtime.log import LogContext, get_logger, log_context
from trunkline_runtime.telemetry.trace_context import HeadSampler, new_span_id, new_trace_id, trace_context

MOST_FIELD = 64  # characters of a field's name: some are a worker's words

RequestListener = Callable[[RequestRecord], object]


class RequestObserver:
    """Observes the requests of a router, and writes a line for each in the log.

    A request that was aborted is told of when its workers have said what became of it. That takes milliseconds, and
    session_outputs.py bounds its time and number. Nothing but the log and the listeners waits for it.

    listeners: are told of each request that has ended, on the event loop. They may keep the record, but plans, sampling
        parameters and all but a few timelines are dropped from it then. What they raise is logged, and fails no request
    may_export: whether a request that the sampler chooses may be exported; otherwise its workers do not export it, too
    running: requests that were not told of yet, the oldest first
    """

    def __init__(
        self,
        sampler: HeadSampler | None = None,
        listeners: Sequence[RequestListener] = (),
        may_export: Callable[[RequestRecord], bool] | None = None,
    ) -> None:
        self._sampler = sampler or HeadSampler()
        self._listeners = listeners
        self._may_export = may_export
        self.running: dict[int, RequestRecord] = {}  # by their identities in memory

    def begin(self, record: RequestRecord, traceparent: str = "", tracestate: str = "") -> "Token[LogContext | None]":
        """Gives the request a place in its caller's trace; without one, in the trace that the record names, or in a new
        one. Until end(), lines of the log name the request. Returns what end() needs."""
        self._trace(record, traceparent, tracestate)
        self.running[id(record)] = record
        return log_context.set(record)

    def end(self, record: RequestRecord, begun: "Token[LogContext | None]") -> None:
        """Ends the record, and tells the listeners."""
        record.ended_s = time.monotonic()
        try:
            log_context.reset(begun)
        except ValueError:  # closed by another task than the one that began it: an abandoned generator
            log_context.set(None)
        if record.awaited:
            record.when_known = self._tell_late
        else:
            self._tell(record)

    def _trace(self, record: RequestRecord, traceparent: str, tracestate: str) -> None:
        caller = trace_context(traceparent, tracestate)
        if caller is None:
            record.trace_id = record.trace_id or new_trace_id()
        else:
            record.trace_id, record.parent_span_id, _, record.tracestate = caller
        record.span_id = new_span_id()
        is_sampled = self._sampler.samples(record.trace_id, None if caller is None else caller.is_sampled)
        record.is_sampled = is_sampled and (self._may_export is None or self._may_export(record))

    def _tell_late(self, record: RequestRecord) -> None:
        token = log_context.set(None)  # that of another request, if its task has brought the news
        try:
            self._tell(record)
        finally:
            log_context.reset(token)

    def _tell(self, record: RequestRecord) -> None:
        del self.running[id(record)]
        record.awaited, record.when_known = 0, None  # what comes later is not noted
        _LOG.info("request ended", **_end_fields(record))
        for listener in self._listeners:
            try:
                listener(record)
            except Exception as error:
                get_logger().error("a request's end cannot be told", **record.log_fields(), exc_info=error)
        record.sampling = None
        for placement in record.placements:
            placement.plan = None
        for attempt in record.attempts:
            attempt.timelines = attempt.timelines[:MOST_TIMELINES]  # a request may have hundreds of choices


def note_refusal(record: RequestRecord, refused: RequestRefused) -> None:
    """The request ends with an error of the table."""
    record.outcome = refused.reason if code_of(refused.reason) is not None else UNKNOWN
    record.code, record.refused_field = refused.code, refused.field[:MOST_FIELD]
    if record.attempts and record.attempts[-1].ended == CANCELLED:
        record.attempts[-1].ended = record.outcome


TENTHS = 1e4  # of milliseconds in a second

_LOG = get_logger()  # once, because there is a line for each request


def _end_fields(record: RequestRecord) -> dict[str, Any]:
    """The fields of the line. Times in milliseconds. What did not happen, or what most requests do not have, is left
    out."""
    fields = record.log_fields()
    fields["tenant"], fields["outcome"], fields["endpoint"] = record.tenant, record.outcome, record.endpoint
    if record.lane:
        fields["lane"] = record.lane
    if record.model:
        fields["model"] = record.model
    if record.choices:
        _add_counts(fields, record)
    if record.method == GRANT:
        fields["grants"] = record.grants
    for name, interval in (("tokenize_ms", record.tokenized), ("admission_ms", record.admitted)):
        if interval is not None:
            fields[name] = _ms(interval.end_s - interval.start_s)
    if record.placements:
        fields["route_ms"] = _ms(sum([placed.time.end_s - placed.time.start_s for placed in record.placements]))
    for name, time_s in (("first_token_ms", record.ttft_s), ("duration_ms", record.duration_s)):
        if time_s is not None:
            fields[name] = _ms(time_s)
    if record.stalled_s:
        fields["stalled_ms"] = _ms(record.stalled_s)
    if record.attempts:
        _add_attempts(fields, record)
    return fields


def _add_counts(fields: dict[str, Any], record: RequestRecord) -> None:
    fields["prompt_tokens"], fields["choices"] = record.prompt_tokens, record.choices
    fields["cached_tokens"], fields["completion_tokens"] = record.cached_tokens, record.completion_tokens
    if record.inputs:
        fields["inputs"] = record.inputs
    if record.cache_miss:
        fields["cache_miss"], fields["seen_tokens"] = record.cache_miss, record.seen_tokens
    if record.grammar:
        fields["grammar"] = record.grammar
    if record.tool_calls:
        fields["tool_calls"] = record.tool_calls
    if record.reasoning_tokens:
        fields["reasoning_tokens"] = record.reasoning_tokens


def _add_attempts(fields: dict[str, Any], record: RequestRecord) -> None:
    """What the workers say: of the first choice in the last attempt that they say anything of, and sums of all."""
    attempts = record.attempts
    timelines = [timeline for attempt in attempts for timeline in attempt.timelines]
    if timelines:
        _add_timeline(fields, next(attempt.timelines[0] for attempt in reversed(attempts) if attempt.timelines))
        fields["device_ms"] = _ms(sum([attempt.device_s for attempt in attempts]))
    if num_gaps := sum([timeline.num_gaps for timeline in timelines]):
        fields["num_gaps"] = num_gaps
    if preemptions := sum([timeline.preemptions for timeline in timelines]):
        fields["preemptions"] = preemptions
        fields["recomputed_tokens"] = sum([timeline.recomputed_tokens for timeline in timelines])
    if len(attempts) > 1 or attempts[0].is_lost:
        fields["failovers"] = _failovers(record)
    cost = record.cost
    if cost is not None:
        fields["cost"] = round(cost, 9)


def _add_timeline(fields: dict[str, Any], timeline: Timeline) -> None:
    fields["queue_ms"] = _ms(timeline.admitted_s if timeline.HasField("admitted_s") else timeline.ended_s)
    chunks = timeline.chunks
    if chunks:
        fields["prefill_ms"] = [_ms(chunk.duration_s) for chunk in chunks]
        fields["prefill_tokens"] = [chunk.tokens for chunk in chunks]
    if timeline.num_gaps:
        fields["gaps_ms"] = [[_ms(gap.at_s), _ms(gap.duration_s)] for gap in timeline.gaps]


def _failovers(record: RequestRecord) -> list[dict[str, Any]]:
    """The workers that were lost or refused the request, with the silence until the next one went on."""
    events = []
    silences = record.silences
    for place, attempt in enumerate(record.attempts):
        if not attempt.is_lost:
            continue
        failover: dict[str, Any] = {"worker": attempt.worker, "reason": attempt.ended, "problem": attempt.problem}
        if (silence := silences.get(place)) is not None:
            failover["silence_ms"] = _ms(silence.duration_s)
        events.append(failover)
    return events


def _ms(seconds: float) -> float:
    """Milliseconds with one digit after the point. round() takes twice as long."""
    return int(seconds * TENTHS + 0.5) / 10

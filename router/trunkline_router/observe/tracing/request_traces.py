"""Decides which requests' spans are exported, once it is known how they ended.

Spans of requests that were sampled when they began are exported by all processes. Requests that turn out to be slow,
failed or resumed are exported in any case, by the router alone: it makes the spans of their workers, too, from the
timelines that workers send.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from trunkline_router.observe.tracing.request_attributes import is_servers_fault
from trunkline_router.observe.tracing.request_spans import later_spans_of, refused_span
from trunkline_router.record.rate_limits import BudgetLimits, FairBudget
from trunkline_router.record.refused_calls import RefusedCall
from trunkline_router.record.request_record import FAILED, RequestRecord, is_worth_a_look
from trunkline_runtime.telemetry.span_queue import Spans
from trunkline_runtime.telemetry.trace_context import NONE_SAMPLED, HeadSampler, new_trace_id, trace_context


@dataclass(frozen=True, slots=True)
class TraceLimits:
    """How many requests are exported.

    sampled: that were sampled when they began, by tenant
    others: that turn out to be slow, failed or resumed, by tenant. These may also use what the sampled ones leave
    refused: calls that were refused before they became requests, by tenant or network. Anyone can send them
    """

    sampled: BudgetLimits
    others: BudgetLimits
    refused: BudgetLimits


# Clients decide how many requests are exported: they set the flag of a trace, and their requests may fail by their own
# doing. To make and encode the spans of one takes 0.3 to 0.5 ms of the interpreter before one worker, more before many,
# and they take places in the queue before the exporter. So one process exports 100 sampled requests a second, which
# takes 3 to 5 % of its time, and half as many that say something whatever clients sample. A refused call is one span,
# which costs less.
TRACE_LIMITS = TraceLimits(
    sampled=BudgetLimits(per_s=100.0, at_once=400.0, reserve=200.0, account_per_s=20.0, account_at_once=40.0),
    others=BudgetLimits(per_s=50.0, at_once=200.0, reserve=100.0, account_per_s=10.0, account_at_once=20.0),
    refused=BudgetLimits(per_s=10.0, at_once=40.0, reserve=20.0, account_per_s=1.0, account_at_once=4.0),
)
SAMPLED, SLOW, RESUMED = "sampled", "slow", "resumed"  # why a request is exported; or FAILED


class Exports(Protocol):
    """Takes spans for the exporter: a SpanQueue, which says what the methods do."""

    def put(self, spans: Spans) -> bool: ...

    def withhold(self) -> None: ...


class RequestTraces:
    """Told of requests and refused calls, it puts the spans of some into the queue of the exporter.

    slow_s: a request is slow if it waits for longer for its first token, or between two tokens; None: no request is
    sampler: for calls that were refused before they became requests
    """

    def __init__(
        self,
        exports: Exports,
        slow_s: float | None,
        clock_s: Callable[[], float] = time.monotonic,
        limits: TraceLimits = TRACE_LIMITS,
        sampler: HeadSampler = NONE_SAMPLED,
    ) -> None:
        self._exports = exports
        self._slow_s = slow_s
        self._clock_s = clock_s
        now_s = clock_s()
        self._sampled = FairBudget(limits.sampled, now_s)
        self._others = FairBudget(limits.others, now_s)
        self._refused = FairBudget(limits.refused, now_s)
        self._sampler = sampler

    def may_export(self, record: RequestRecord) -> bool:
        """Takes a request that begins, and is sampled, from the budget of sampled ones. If there is no room for it, it
        counts as not sampled, so that workers do not export spans of a request whose own span is withheld."""
        record.has_export_place = self._sampled.takes(record.tenant, self._clock_s())
        return record.has_export_place

    def request_ended(self, record: RequestRecord) -> None:
        """Exports a request that has ended, if it is to be exported."""
        kept = why_kept(record, self._slow_s)
        has_place = record.has_export_place
        if kept and (has_place or self._has_room(record.tenant)):
            record.is_exported = self._exports.put(later_spans_of(record, kept))
        elif kept or has_place is False:
            self._exports.withhold()

    def call_refused(self, call: RefusedCall) -> None:
        """The spans of calls that their clients sample are exported, and of those that failed
        through no fault of their clients."""
        caller = trace_context(call.traceparent, call.tracestate)
        is_sampled = caller is not None and self._sampler.samples(caller.trace_id, caller.is_sampled)
        if not is_sampled and not is_servers_fault(call):
            return
        now_s = self._clock_s()
        if not self._refused.takes(call.account, now_s):
            self._exports.withhold()
            return
        started_s = now_s if call.started_s is None else call.started_s
        record = RequestRecord(call.request_id, started_s, time.time_ns() - int((now_s - started_s) * 1e9))
        if caller is None:
            record.trace_id = new_trace_id()
        else:
            record.trace_id, record.parent_span_id, _, record.tracestate = caller
        kept = SAMPLED if is_sampled else FAILED
        self._exports.put(partial(refused_span, call, record, now_s, kept))

    def _has_room(self, tenant: str) -> bool:
        """Takes a request that ends, and got no place when it began, from the budget."""
        now_s = self._clock_s()
        return self._others.takes(tenant, now_s) or self._sampled.takes(tenant, now_s)


def why_kept(record: RequestRecord, slow_s: float | None) -> list[str]:
    """Why a request is exported; nothing: it is not."""
    why = [SAMPLED] if record.is_sampled else []
    if slow_s is not None and longest_wait_s(record) > slow_s:
        why.append(SLOW)
    if is_worth_a_look(record):
        why.append(FAILED)
    if record.resumptions:
        why.append(RESUMED)
    return why


def longest_wait_s(record: RequestRecord) -> float:
    """The longest time in which the client waited for a token: the first one, or one between two others. Time in which
    the client did not read does not count."""
    ttft_s = record.ttft_s
    waits_s = [ttft_s if ttft_s is not None else record.duration_s or 0.0]
    waits_s += [timeline.longest_gap_s for attempt in record.attempts for timeline in attempt.timelines]
    if len(record.attempts) > 1:  # there are silences between two attempts alone
        waits_s += [silence.duration_s for silence in record.silences.values()]
    return max(waits_s)

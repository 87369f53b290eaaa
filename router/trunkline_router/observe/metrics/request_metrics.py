"""Metrics of requests: how many, how long, and where the time went."""

from collections.abc import Callable, Iterable

from prometheus_client.core import Metric

from trunkline_router.observe.metrics.first_token_phases import phases_of
from trunkline_router.observe.metrics.request_labels import RequestLabels
from trunkline_router.record.request_record import OK, RequestRecord
from trunkline_runtime.telemetry.exposition import counter, histogram
from trunkline_runtime.telemetry.series_counts import SeriesBuckets, SeriesCounts

LATENCY_BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0),
)  # fmt: skip
GAP_BUCKETS = (0.0, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)  # 0: no gap over the worker's target
PROMPT_COMPUTED, PROMPT_CACHED, OUTPUT = "prompt_computed", "prompt_cached", "output"


def tokens_of(record: RequestRecord) -> Iterable[tuple[str, int]]:
    """Tokens by kind. A prompt counts once a worker has computed it."""
    if record.first_token_s is not None:
        yield PROMPT_COMPUTED, record.prompt_tokens - record.cached_tokens
        yield PROMPT_CACHED, record.cached_tokens
    yield OUTPUT, record.completion_tokens


class RequestMetrics:
    """Counts requests that have ended.

    unix_s: the time, for examples
    """

    def __init__(self, unix_s: Callable[[], float]) -> None:
        self._unix_s = unix_s
        self._requests = SeriesCounts(4)
        self._first_token = SeriesBuckets(2, LATENCY_BUCKETS)
        self._whole = SeriesBuckets(2, LATENCY_BUCKETS)
        self._phases = SeriesBuckets(2, LATENCY_BUCKETS, most=256)
        self._gaps = SeriesBuckets(1, GAP_BUCKETS)
        self._tokens = SeriesCounts(3)
        self._stalled_s = SeriesCounts(1)

    def request_ended(self, record: RequestRecord, labels: RequestLabels) -> None:
        """Counts a request."""
        model, lane = labels.model, labels.lane
        self._requests.add((model, lane, labels.endpoint, labels.outcome))
        trace_id = labels.trace_id
        ttft_s, duration_s = record.ttft_s, record.duration_s
        if ttft_s is not None:
            self._first_token.of((model, lane)).add_traced(ttft_s, trace_id, self._unix_s())
            for phase, spent_s in phases_of(record):
                self._phases.of((model, phase)).add(spent_s)
        if duration_s is not None and labels.result == OK:
            self._whole.of((model, lane)).add_traced(duration_s, trace_id, self._unix_s())
        for kind, count in tokens_of(record):
            if count:
                self._tokens.add((model, lane, kind), count)
        if record.stalled_s:
            self._stalled_s.add((model,), record.stalled_s)
        gaps = None
        for attempt in record.attempts:
            for timeline in attempt.timelines:
                gaps = gaps or self._gaps.of((model,))
                gaps.add_traced(timeline.longest_gap_s, trace_id, self._unix_s())

    def families(self) -> Iterable[Metric]:
        """All families."""
        yield counter(
            "trunkline_router_requests",
            "Requests that ended, by outcome: a finish reason, several, granted, cancelled, SLOW_READER, or the reason "
            "of an error.",
            ("model_name", "lane", "endpoint", "outcome"),
            self._requests.items(),
        )
        for name, documentation, counts in (
            ("first_token_seconds", "Time from a request's arrival to its first output.", self._first_token),
            ("request_seconds", "Time from the arrival of an answered request to its end.", self._whole),
        ):
            yield histogram(f"trunkline_router_{name}", documentation, ("model_name", "lane"), counts.items())
        yield histogram(
            "trunkline_router_phase_seconds",
            "Where the time to the first output went, for phases that took time. Those of a request add up to it.",
            ("model_name", "phase"),
            self._phases.items(),
        )
        yield histogram(
            "trunkline_router_token_gap_seconds",
            "Longest gap between two output tokens of a choice, if it exceeds the worker's target; 0 otherwise.",
            ("model_name",),
            self._gaps.items(),
        )
        yield counter(
            "trunkline_router_tokens",
            "Tokens of requests that ended: of prompts, computed or cached, and of output.",
            ("model_name", "lane", "kind"),
            self._tokens.items(),
        )
        yield counter(
            "trunkline_router_stalled_seconds",
            "Time in which output waited for clients that did not read.",
            ("model_name",),
            self._stalled_s.items(),
        )

"""Metrics of routing and of attempts at workers: was the prediction right, which attempts were lost, and for how long
did clients hear nothing."""

from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise

from prometheus_client.core import Metric

from trunkline_router.observe.metrics.request_labels import MODEL, RequestLabels, reason_label
from trunkline_router.record.request_record import (
    CANCELLED,
    COMPLETE,
    GRANTED,
    AttemptRecord,
    PlacementRecord,
    RequestRecord,
)
from trunkline_runtime.telemetry.series import SeriesBuckets, SeriesCounts, SeriesGroup, counter, gauge

RATIO_BUCKETS = (0.1, 0.25, 0.5, 0.67, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0, 10.0)
ENDS = frozenset({COMPLETE, CANCELLED, GRANTED})
SILENCE_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
MAX_WORKERS = 1000  # that have series of their own


@dataclass(slots=True)
class OfWorker:
    """Sums over the attempts at one worker."""

    ended: Counter[str] = field(default_factory=Counter)
    first_tokens: int = 0
    first_token_s: float = 0.0
    predicted_s: float = 0.0
    error_s: float = 0.0
    clock_skew_s: float | None = None


class WorkerMetrics:
    """Of the workers that were used last: workers come and go, and each may be a new name. A worker that returns after
    it was forgotten counts from zero, which Prometheus takes for a restart."""

    def __init__(self) -> None:
        self._workers: OrderedDict[str, OfWorker] = OrderedDict()

    def of(self, worker: str) -> OfWorker:
        """A worker's sums, to be added to."""
        sums = self._workers.pop(worker, None) or OfWorker()
        self._workers[worker] = sums
        if len(self._workers) > MAX_WORKERS:
            self._workers.popitem(last=False)
        return sums

    def families(self) -> Iterable[Metric]:
        """All families."""
        known = list(self._workers.items())
        for name, documentation, attribute in (
            ("first_tokens", "Attempts with a first output and a prediction of it.", "first_tokens"),
            ("first_token_seconds", "Times to their first outputs, summed.", "first_token_s"),
            ("predicted_first_token_seconds", "Predictions of these times, summed.", "predicted_s"),
            ("first_token_error_seconds", "Differences between the two, without sign, summed.", "error_s"),
        ):
            samples = [((name,), getattr(sums, attribute)) for name, sums in known]
            yield counter(f"trunkline_router_worker_{name}", documentation, ("worker",), samples)
        yield counter(
            "trunkline_router_worker_attempts",
            "Attempts that ended: complete, cancelled, or the reason of an error.",
            ("worker", "outcome"),
            [((name, ended), count) for name, sums in known for ended, count in sums.ended.items()],
        )
        yield gauge(
            "trunkline_router_worker_clock_skew_seconds",
            "The worker's clock minus the router's, by the latest answer.",
            ("worker",),
            [((name,), sums.clock_skew_s) for name, sums in known if sums.clock_skew_s is not None],
        )


class AttemptMetrics(SeriesGroup):
    """Counted at the ends of requests."""

    def __init__(self) -> None:
        self._decisions = SeriesCounts(
            "trunkline_router_route_decisions", "Decisions for a worker, by policy and reason.", ("policy", "reason")
        )
        self._matched_tokens = SeriesCounts(
            "trunkline_router_route_matched_tokens",
            "Prompt tokens that the index promised at the chosen worker.",
            MODEL,
        )
        self._prompt_tokens = SeriesCounts(
            "trunkline_router_route_prompt_tokens", "Prompt tokens of routed requests.", MODEL
        )
        self._ratio = SeriesBuckets(
            "trunkline_router_first_token_prediction_ratio",
            "Time to the first output of an attempt, or the last one of several inputs, divided by the prediction.",
            MODEL,
            RATIO_BUCKETS,
        )
        self._retries = SeriesCounts(
            "trunkline_router_retries",
            "Attempts at another worker before there was any output.",
            ("model_name", "reason"),
        )
        self._failovers = SeriesCounts(
            "trunkline_router_failovers",
            "Attempts that continued an answer at another worker.",
            ("model_name", "reason"),
        )
        self._silence = SeriesBuckets(
            "trunkline_router_failover_silence_seconds",
            "Time from the last output of a lost attempt to the first output of the one that continued it.",
            MODEL,
            SILENCE_BUCKETS,
        )
        self._workers = WorkerMetrics()

    def request_ended(self, record: RequestRecord, labels: RequestLabels, unix_s: float) -> None:
        """Counts a request that ended now."""
        model = labels.model
        for placement in record.placements:
            if placement.plan is not None:
                self._decisions.add(placement.policy, placement.plan.why)
                self._matched_tokens.add(model, count=placement.matched_tokens)
                self._prompt_tokens.add(model, count=record.prompt_tokens)
        for attempt in record.attempts:
            self._count(attempt, record.placement_of(attempt), record.answered_s(attempt), model)
        for lost, following in pairwise(record.attempts):
            counts = self._retries if following.resumed_at_tokens is None else self._failovers
            counts.add(model, reason_label(lost.ended))
        silences = self._silence.of(model)  # before the first failover too: a rate needs a sample from before it
        for silence in record.silences.values():
            silences.add_traced(silence.duration_s, labels.trace_id, unix_s)

    def _count(
        self, attempt: AttemptRecord, placement: PlacementRecord | None, answered_s: float | None, model: str
    ) -> None:
        worker, ended = self._workers.of(attempt.worker), attempt.ended
        worker.ended[ended if ended in ENDS else reason_label(ended)] += 1
        if attempt.clock_skew_s is not None:
            worker.clock_skew_s = attempt.clock_skew_s
        predicted_s = None if placement is None else placement.predicted_ttft_s
        if predicted_s is None or answered_s is None:
            return
        real_s = answered_s - attempt.started_s
        worker.first_tokens += 1
        worker.first_token_s += real_s
        worker.predicted_s += predicted_s
        worker.error_s += abs(real_s - predicted_s)
        if predicted_s > 0:
            self._ratio.of(model).add(real_s / predicted_s)

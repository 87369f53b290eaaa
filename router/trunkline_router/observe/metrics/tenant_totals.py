"""What tenants had of the fleet, and what it cost. Their number is bounded, see RequestLabels."""

from collections.abc import Iterable

from prometheus_client.core import Metric

from trunkline_router.observe.metrics.request_labels import RequestLabels
from trunkline_router.observe.metrics.request_metrics import tokens_of
from trunkline_router.record.request_record import RequestRecord
from trunkline_runtime.telemetry.exposition import counter, histogram
from trunkline_runtime.telemetry.series_counts import SeriesBuckets, SeriesCounts

MAX_LABELS = 128  # tenants: those with labels of their own, none, and the others
FIRST_TOKEN_BUCKETS = (0.1, 0.25, 0.5, 1.0, 2.5)  # few: each is a series for every tenant


class TenantTotals:
    """Counted at the ends of requests."""

    def __init__(self) -> None:
        self._requests = SeriesCounts(3)
        self._tokens = SeriesCounts(3)
        self._first_token = SeriesBuckets(1, FIRST_TOKEN_BUCKETS, most=MAX_LABELS)
        self._device_s = SeriesCounts(1)
        self._cost = SeriesCounts(1)
        self._cost_of_model = SeriesCounts(1)

    def request_ended(self, record: RequestRecord, labels: RequestLabels) -> None:
        """Counts a request."""
        tenant, lane = labels.tenant, labels.lane
        self._requests.add((tenant, lane, labels.result))
        for kind, count in tokens_of(record):
            if count:
                self._tokens.add((tenant, lane, kind), count)
        if record.ttft_s is not None:
            self._first_token.of((tenant,)).add(record.ttft_s)
        device_s = sum(timeline.device_s for attempt in record.attempts for timeline in attempt.timelines)
        if device_s:
            self._device_s.add((tenant,), device_s)
        cost = record.cost
        if cost:
            self._cost.add((tenant,), cost)
            self._cost_of_model.add((labels.model,), cost)

    def families(self) -> Iterable[Metric]:
        """All families."""
        yield counter(
            "trunkline_router_tenant_requests",
            "Requests that ended, by result: ok, refused, cancelled or failed.",
            ("tenant", "lane", "result"),
            self._requests.items(),
        )
        yield counter(
            "trunkline_router_tenant_tokens",
            "Tokens of requests that ended: of prompts, computed or cached, and of output.",
            ("tenant", "lane", "kind"),
            self._tokens.items(),
        )
        yield histogram(
            "trunkline_router_tenant_first_token_seconds",
            "Time from a request's arrival to its first output.",
            ("tenant",),
            self._first_token.items(),
        )
        for name, documentation, label, counts in (
            ("tenant_device_seconds", "Device time of requests: their shares of steps.", "tenant", self._device_s),
            ("tenant_cost", "Price of that device time, at workers with a price.", "tenant", self._cost),
            ("cost", "Price of the device time of requests, at workers with a price.", "model_name",
             self._cost_of_model),
        ):  # fmt: skip
            yield counter(f"trunkline_router_{name}", documentation, (label,), counts.items())

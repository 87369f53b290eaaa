"""Everything that is counted of requests when they end."""

import time
from collections.abc import Callable, Iterable

from prometheus_client.core import Metric

from trunkline_router.observe.metrics.attempt_metrics import AttemptMetrics
from trunkline_router.observe.metrics.genai_metrics import GenAiMetrics
from trunkline_router.observe.metrics.request_labels import LabelRules
from trunkline_router.observe.metrics.request_metrics import RequestMetrics
from trunkline_router.observe.metrics.tenant_totals import TenantTotals
from trunkline_router.record.request_record import RequestRecord
from trunkline_runtime.telemetry.bounded_names import BoundedNames


class RequestCounts:
    """A RequestListener.  unix_s: the time, for examples"""

    def __init__(self, rules: LabelRules, unix_s: Callable[[], float] = time.time) -> None:
        self._rules = rules
        self._parts = (RequestMetrics(unix_s), AttemptMetrics(unix_s), TenantTotals(), GenAiMetrics(unix_s))

    @property
    def tenants(self) -> BoundedNames:
        """The tenants that have labels of their own."""
        return self._rules.tenants

    def request_ended(self, record: RequestRecord) -> None:
        """Counts a request."""
        labels = self._rules.of(record)
        for part in self._parts:
            part.request_ended(record, labels)

    def families(self) -> Iterable[Metric]:
        """All families."""
        for part in self._parts:
            yield from part.families()

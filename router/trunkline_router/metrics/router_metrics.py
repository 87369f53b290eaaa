"""All metrics of one router process."""

import time
from collections.abc import Callable, Iterable, Sequence

from prometheus_client.core import Metric

from trunkline_router.identity.endpoints import METHODS, PATHS
from trunkline_router.metrics.attempt_metrics import AttemptMetrics
from trunkline_router.metrics.genai_metrics import GenAiMetrics
from trunkline_router.metrics.request_labels import LabelRules
from trunkline_router.metrics.request_metrics import RequestMetrics
from trunkline_router.metrics.tenant_totals import TenantTotals
from trunkline_router.telemetry.request_record import RequestRecord
from trunkline_runtime.telemetry.bounded_names import BoundedNames
from trunkline_runtime.telemetry.exposition import Families

# As records name them: paths, and RPCs without a leading slash.
ENDPOINTS = frozenset({name.partition(" ")[2] for name in PATHS} | {name[1:] for name in METHODS})

Source = Callable[[], Iterable[Metric]]  # reads a part of the router


class RouterMetrics:
    """Counts requests as they end, and reads the parts of the router when metrics are asked for. A RequestListener.

    tenants: those with labels of their own
    sources: of the metrics that are not counted here
    """

    def __init__(
        self, tenants: BoundedNames, sources: Sequence[Source], unix_s: Callable[[], float] = time.time
    ) -> None:
        self._rules = LabelRules(tenants, ENDPOINTS)
        self._counted = (RequestMetrics(unix_s), AttemptMetrics(unix_s), TenantTotals(), GenAiMetrics(unix_s))
        self._sources = sources

    def request_ended(self, record: RequestRecord) -> None:
        """Counts a request."""
        labels = self._rules.of(record)
        for part in self._counted:
            part.request_ended(record, labels)

    def families(self) -> Families:
        """All families, made one by one."""
        for part in self._counted:
            yield from part.families()
        for source in self._sources:
            yield from source()

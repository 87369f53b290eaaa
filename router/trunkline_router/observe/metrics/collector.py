"""All metrics of a router process: what is counted when requests end, and what is read when it is scraped."""

import time
from collections.abc import Callable, Iterable
from itertools import chain

from prometheus_client.core import Metric

from trunkline_router.access.access import Tenants
from trunkline_router.access.gate.request_gate import RequestGate
from trunkline_router.access.identity.needed_roles import METHODS, PATHS
from trunkline_router.observe.metrics.attempt_metrics import AttemptMetrics
from trunkline_router.observe.metrics.request_metrics import (
    MAX_TENANTS,
    GenAiMetrics,
    LabelRules,
    RequestMetrics,
    TenantTotals,
)
from trunkline_router.observe.metrics.router_gauges import GateGauges, ProcessGauges, SharedStateGauges
from trunkline_router.observe.metrics.worker_gauges import WorkerGauges
from trunkline_router.record.request_record import RequestRecord
from trunkline_router.request.inference import Inference
from trunkline_router.settings import RouterSettings
from trunkline_runtime.telemetry.exposition import Collect, Families
from trunkline_runtime.telemetry.process_families import CertificateExpiry
from trunkline_runtime.telemetry.series import BoundedNames
from trunkline_runtime.tls import ServerTls

# As records name them: paths, and RPCs without a leading slash.
ENDPOINTS = frozenset({name.partition(" ")[2] for name in PATHS} | {name[1:] for name in METHODS})


class RequestCounts:
    """Everything that is counted of requests when they end; a RequestListener.  unix_s: the time, for examples"""

    def __init__(self, rules: LabelRules, unix_s: Callable[[], float] = time.time) -> None:
        self._rules = rules
        self._unix_s = unix_s
        self._parts = (RequestMetrics(), AttemptMetrics(), TenantTotals(), GenAiMetrics())

    @property
    def tenants(self) -> BoundedNames:
        """The tenants that have labels of their own."""
        return self._rules.tenants

    def request_ended(self, record: RequestRecord) -> None:
        """Counts a request."""
        labels, unix_s = self._rules.of(record), self._unix_s()
        for part in self._parts:
            part.request_ended(record, labels, unix_s)

    def families(self) -> Iterable[Metric]:
        """All families."""
        for part in self._parts:
            yield from part.families()


def label_rules(tenants: Tenants) -> LabelRules:
    """Tenants that the tenants file lists have labels of their own first."""
    return LabelRules(BoundedNames(MAX_TENANTS, tenants.named), ENDPOINTS)


def collector(counted: RequestCounts, inference: Inference, gate: RequestGate, process: ProcessGauges) -> Collect:
    """Returns what makes all metrics of a router process, one by one."""
    dispatcher = inference.dispatcher
    sources = (
        counted,
        GateGauges(gate, inference.running, dispatcher),
        WorkerGauges(inference.pools, dispatcher.clock_s),
        SharedStateGauges(inference.shared, counted.tenants),
        process,
    )

    async def collect() -> Families:
        return chain.from_iterable(source.families() for source in sources)

    return collect


def certificates_of(settings: RouterSettings, tls: ServerTls | None) -> CertificateExpiry:
    """All certificates that a router presents or trusts, apart from those of identities."""
    workers, redis = settings.worker_tls, settings.redis_tls
    files = {
        "worker_tls_certificate": workers.worker_tls_cert,
        "worker_tls_ca": workers.worker_tls_ca,
        "redis_tls_certificate": redis.redis_tls_cert,
        "redis_tls_ca": redis.redis_tls_ca,
    }
    return CertificateExpiry(tls, files)

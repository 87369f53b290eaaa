"""Metrics of a router process that are read at a scrape: its requests, refused calls, quotas, Redis and itself."""

from collections import Counter
from collections.abc import Iterable
from importlib.metadata import version

from prometheus_client import ProcessCollector
from prometheus_client.core import Metric

from trunkline_router.access.gate.request_gate import RequestGate
from trunkline_router.observe.metrics.request_metrics import reason_label
from trunkline_router.quotas.quota import QUOTA_NAMES, REQUESTS_PER_MINUTE, TOKENS_IN_FLIGHT, TOKENS_PER_MINUTE
from trunkline_router.quotas.redis_store import RedisStore
from trunkline_router.quotas.shared_state import SharedState
from trunkline_router.record.error_statuses import PROTOCOL
from trunkline_router.request.inference import Running
from trunkline_router.request.placement import Dispatcher
from trunkline_runtime.loop_lag import LoopLag
from trunkline_runtime.telemetry.exposition import counter, gauge, histogram
from trunkline_runtime.telemetry.process_families import (
    CertificateExpiry,
    certificate_families,
    log_family,
    spans_family,
)
from trunkline_runtime.telemetry.series import OTHER, BoundedNames
from trunkline_runtime.telemetry.span_queue import ExportCounts

HTTP_REASONS = frozenset(row.code for row in PROTOCOL.values())  # of errors of HTTP itself
OF_PROCESS = frozenset(
    {"process_cpu_seconds", "process_resident_memory_bytes", "process_open_fds", "process_start_time_seconds"}
)


class GateGauges:
    """What requests take of the router now, and the calls that it did not let in."""

    def __init__(self, gate: RequestGate, running: Running, dispatcher: Dispatcher) -> None:
        self._gate = gate
        self._running = running
        self._dispatcher = dispatcher

    def families(self) -> Iterable[Metric]:
        """All families."""
        gate, dispatcher, now_s = self._gate, self._dispatcher, self._dispatcher.clock_s()
        for name, documentation, value in (
            ("open_requests", "Requests that have passed the gate and have not ended.", gate.requests.num_held),
            ("running_requests", "Requests that are being served.", self._running.num_running),
            ("waiting_requests", "Requests that wait until a worker can take them.", dispatcher.pools.num_waiting),
            ("large_request_bytes", "Large requests in memory whose answers have not begun.", gate.held.num_held),
            ("unread_bytes", "Output that waits for clients to read it.", dispatcher.backlog.waiting_bytes),
            ("retry_budget", "Retries that may be made at once.", dispatcher.budget.left(now_s)),
            ("quarantined", "Requests that are refused because they killed workers.",
             dispatcher.quarantine.num_in_force(now_s)),
        ):  # fmt: skip
            yield gauge(f"trunkline_router_{name}", documentation, (), [((), float(value))])
        yield gauge(
            "trunkline_router_ready",
            "1 if a worker accepts requests.",
            (),
            [((), float(bool(dispatcher.pools.models())))],
        )
        yield counter(
            "trunkline_router_calls_refused",
            "Calls that were refused before, or without, a request: credentials, sizes, paths, too many open calls.",
            ("protocol", "reason"),
            [(labels, float(count)) for labels, count in _by_label(gate.refused.counts).items()],
        )
        quarantine = dispatcher.quarantine
        yield counter(
            "trunkline_router_quarantines",
            "Requests convicted of killing workers: in the whole fleet, or in this router alone.",
            ("scope",),
            [(("fleet",), float(quarantine.convicted)), (("router",), float(quarantine.convicted_briefly))],
        )


def _by_label(refused: Counter[tuple[str, str]]) -> Counter[tuple[str, str]]:
    """Several reasons have the same label."""
    counts: Counter[tuple[str, str]] = Counter()
    for (protocol, reason), count in refused.items():
        counts[protocol, reason if reason in HTTP_REASONS else reason_label(reason)] += count
    return counts


class SharedStateGauges:
    """Quotas, and the Redis that routers share them in."""

    def __init__(self, shared: SharedState, tenants: BoundedNames) -> None:
        self._shared = shared
        self._tenants = tenants

    def families(self) -> Iterable[Metric]:
        """All families."""
        shared = self._shared
        yield from self._quotas()
        yield counter(
            "trunkline_router_quota_refusals",
            "Requests refused because a quota was used up, or could not be checked (unknown).",
            ("quota",),
            [((quota,), float(count)) for quota, count in shared.admission.refused.items()],
        )
        alone = shared.admission.reserves_alone
        yield counter(
            "trunkline_router_quota_decisions",
            "Requests of tenants with quotas, by what decided: the store, or this router alone.",
            ("by",),
            [(("store",), float(shared.admission.reserves - alone)), (("alone",), float(alone))],
        )
        yield from self._redis()

    def _quotas(self) -> Iterable[Metric]:
        used_now, limits = [], []
        for tenant, quotas, used in self._shared.quota_use():
            label = self._tenants.label(tenant)
            if label == OTHER:
                continue  # quotas of several tenants cannot be told as one
            values = {
                REQUESTS_PER_MINUTE: used.requests,
                TOKENS_PER_MINUTE: used.tokens,
                TOKENS_IN_FLIGHT: used.in_flight,
            }
            for name in QUOTA_NAMES:
                limit = getattr(quotas, name)
                if limit is not None:
                    used_now.append(((label, name), float(values[name])))
                    limits.append(((label, name), float(limit)))
        labels = ("tenant", "quota")
        documentation = "What counts against a quota, in the fleet as far as this router knows."
        yield gauge("trunkline_router_quota_used", documentation, labels, used_now)
        yield gauge("trunkline_router_quota_limit", "A tenant's quota.", labels, limits)

    def _redis(self) -> Iterable[Metric]:
        """Without samples, if the state is in this process alone."""
        shared = self._shared
        store = shared.store if isinstance(shared.store, RedisStore) else None

        def only(value: float) -> list[tuple[tuple[str, ...], float]]:
            return [] if store is None else [((), float(value))]

        yield gauge(
            "trunkline_router_redis_reachable",
            "1 while the circuit breaker of Redis is closed.",
            (),
            only(shared.is_reachable),
        )
        for name, documentation, count in (
            ("losses", "Times that the circuit breaker of Redis has opened.", shared.times_lost),
            ("late_answers", "Requests whose answer Redis gave too late.", shared.late_answers),
            ("syncs", "Exchanges with Redis.", shared.syncs),
            ("entries", "Times that Redis was new or empty, and was told everything.", shared.times_entered),
        ):
            yield counter(f"trunkline_router_redis_{name}", documentation, (), only(count))
        yield gauge(
            "trunkline_router_neighbours",
            "Other routers, and other processes of this one, that share this Redis.",
            (),
            only(shared.num_neighbours),
        )
        yield histogram(
            "trunkline_router_redis_call_seconds",
            "Time from sending a script call to its reply, late ones too.",
            ("script",),
            [] if store is None else [((name,), counts) for name, counts in store.latencies.items()],
        )


class ProcessGauges:
    """The process itself.

    spans: what became of spans; None: they are not exported
    restarts: how often the process was started again; None: it is the only one of its router
    """

    def __init__(
        self,
        lag: LoopLag,
        certificates: CertificateExpiry,
        spans: ExportCounts | None = None,
        restarts: int | None = None,
    ) -> None:
        self._lag = lag
        self._certificates = certificates
        self._spans = spans
        self._restarts = restarts
        self._process = ProcessCollector(registry=None)  # registered nowhere

    def families(self) -> Iterable[Metric]:
        """All families."""
        yield gauge(
            "trunkline_router_event_loop_lag_seconds",
            "Longest time that a due callback waited in the last minute.",
            (),
            [((), self._lag.recent_s())],
        )
        yield gauge("trunkline_router_processes", "Always 1: the sum is the number of processes.", (), [((), 1.0)])
        yield counter(
            "trunkline_router_process_restarts",
            "How often this process of the router died and was replaced. Absent if the router is one process.",
            (),
            [] if self._restarts is None else [((), float(self._restarts))],
        )
        yield gauge(
            "trunkline_router_build_info", "The router's version, as a label.", ("version",),
            [((version("trunkline"),), 1.0)],
        )  # fmt: skip
        yield from certificate_families(self._certificates)
        yield spans_family("trunkline_router_spans", self._spans)
        yield log_family("trunkline_router_dropped_log_lines")
        yield from (family for family in self._process.collect() if family.name in OF_PROCESS)

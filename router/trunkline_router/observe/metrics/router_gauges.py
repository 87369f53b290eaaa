"""Metrics of a router process that are read at a scrape: its requests, refused calls, quotas, and Redis."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import version

from prometheus_client.core import Metric

from trunkline_router.access.gate.request_gate import RequestGate
from trunkline_router.observe.metrics.request_labels import reason_label
from trunkline_router.quotas.shared_state import SharedState
from trunkline_router.record.error_statuses import PROTOCOL
from trunkline_router.request.inference import Inference
from trunkline_runtime.telemetry.series import OTHER, BoundedNames, Samples, counter, gauge, histogram

HTTP_REASONS = frozenset(row.code for row in PROTOCOL.values())  # of errors of HTTP itself

Kind = Callable[[str, str, Sequence[str], Samples], Metric]  # gauge or counter


def _one(kind: Kind, name: str, documentation: str, value: float | None) -> Metric:
    """A family of one value; of none, if there is none."""
    return kind(f"trunkline_router_{name}", documentation, (), [] if value is None else [((), float(value))])


def gate_families(gate: RequestGate, inference: Inference) -> Iterable[Metric]:
    """What requests take of the router now, and the calls that it did not let in."""
    dispatcher = inference.dispatcher
    now_s, quarantine = dispatcher.clock_s(), dispatcher.quarantine
    for name, documentation, value in (
        ("open_requests", "Requests that have passed the gate and have not ended.", gate.requests.num_held),
        ("running_requests", "Requests that are being served.", inference.running.num_running),
        ("waiting_requests", "Requests that wait until a worker can take them.", dispatcher.pools.num_waiting),
        ("large_request_bytes", "Large requests in memory whose answers have not begun.", gate.held.num_held),
        ("unread_bytes", "Output that waits for clients to read it.", dispatcher.backlog.waiting_bytes),
        ("retry_budget", "Retries that may be made at once.", dispatcher.budget.left(now_s)),
        ("quarantined", "Requests that are refused because they killed workers.", quarantine.num_in_force(now_s)),
        ("ready", "1 if a worker accepts requests.", bool(dispatcher.pools.models())),
    ):
        yield _one(gauge, name, documentation, value)
    refused: Counter[tuple[str, str]] = Counter()
    for (protocol, reason), count in gate.refused.counts.items():
        refused[protocol, reason if reason in HTTP_REASONS else reason_label(reason)] += count
    yield counter(
        "trunkline_router_calls_refused",
        "Calls that were refused before, or without, a request: credentials, sizes, paths, too many open calls.",
        ("protocol", "reason"),
        refused.items(),
    )
    yield counter(
        "trunkline_router_quarantines",
        "Requests convicted of killing workers: in the whole fleet, or in this router alone.",
        ("scope",),
        [(("fleet",), quarantine.convicted), (("router",), quarantine.convicted_briefly)],
    )


def quota_families(shared: SharedState, tenants: BoundedNames) -> Iterable[Metric]:
    """Quotas, and what decided about them."""
    used_now: list[tuple[tuple[str, str], float]] = []
    limits: list[tuple[tuple[str, str], float]] = []
    for tenant, quotas, used in shared.quota_use():
        label = tenants.label(tenant)
        if label == OTHER:
            continue  # quotas of several tenants cannot be told as one
        for name, limit, value in used.against(quotas):
            used_now.append(((label, name), value))
            limits.append(((label, name), limit))
    labels = ("tenant", "quota")
    documentation = "What counts against a quota, in the fleet as far as this router knows."
    yield gauge("trunkline_router_quota_used", documentation, labels, used_now)
    yield gauge("trunkline_router_quota_limit", "A tenant's quota.", labels, limits)
    admission = shared.admission
    yield counter(
        "trunkline_router_quota_refusals",
        "Requests refused because a quota was used up, or could not be checked (unknown).",
        ("quota",),
        [((quota,), count) for quota, count in admission.refused.items()],
    )
    alone = admission.reserves_alone
    yield counter(
        "trunkline_router_quota_decisions",
        "Requests of tenants with quotas, by what decided: the store, or this router alone.",
        ("by",),
        [(("store",), admission.reserves - alone), (("alone",), alone)],
    )


def redis_families(shared: SharedState) -> Iterable[Metric]:
    """The Redis that routers share state in. Without samples, if the state is in this process alone."""
    link = shared.link
    kinds = (
        (gauge, "redis_reachable", "1 while the circuit breaker of Redis is closed."),
        (counter, "redis_losses", "Times that the circuit breaker of Redis has opened."),
        (counter, "redis_late_answers", "Requests whose answer Redis gave too late."),
        (counter, "redis_syncs", "Exchanges with Redis."),
        (counter, "redis_entries", "Times that Redis was new or empty, and was told everything."),
        (gauge, "neighbours", "Other routers, and other processes of this one, that share this Redis."),
    )
    values: Sequence[float | None] = [None] * len(kinds)
    if link is not None:
        counts = link.breaker.times_opened, link.late_answers, link.syncs, link.entries
        values = [link.is_reachable, *counts, len(shared.neighbours)]
    for (kind, name, documentation), value in zip(kinds, values, strict=True):
        yield _one(kind, name, documentation, value)
    latencies = {} if link is None else link.store.latencies
    yield histogram(
        "trunkline_router_redis_call_seconds",
        "Time from sending a script call to its reply, late ones too.",
        ("script",),
        [((name,), counts) for name, counts in latencies.items()],
    )


def build_families(restarts: int | None) -> Iterable[Metric]:
    """restarts: how often the process was started again; None: it is the only one of its router"""
    yield _one(gauge, "processes", "Always 1: the sum is the number of processes.", 1.0)
    documentation = "How often this process of the router died and was replaced. Absent if the router is one process."
    yield _one(counter, "process_restarts", documentation, restarts)
    documentation = "The router's version, as a label."
    yield gauge("trunkline_router_build_info", documentation, ("version",), [((version("trunkline"),), 1.0)])

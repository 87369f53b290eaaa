"""Metrics of quotas, and of the Redis that routers share them in."""

from collections.abc import Iterable

from prometheus_client.core import Metric

from trunkline_router.quotas.quota import QUOTA_NAMES, REQUESTS_PER_MINUTE, TOKENS_IN_FLIGHT, TOKENS_PER_MINUTE
from trunkline_router.quotas.shared_state.state import SharedState
from trunkline_router.quotas.stores.redis_store import RedisStore
from trunkline_runtime.telemetry.bounded_names import OTHER, BoundedNames
from trunkline_runtime.telemetry.exposition import counter, gauge, histogram


class SharedStateGauges:
    """Reads the shared state at a scrape."""

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

"""A model of the store: the same answers as those of the scripts in Redis, in a few lines of Python."""

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field

from trunkline_router.quotas.fairness import HALF_LIFE_MS, MAX_TENANTS, decayed
from trunkline_router.quotas.quota import WINDOW_MS, Used, Window, judge
from trunkline_router.quotas.redis_store import RedisStore
from trunkline_router.quotas.store import (
    KEEP_MS,
    MAX_CONVICTIONS,
    TTL_MS,
    Answer,
    Ask,
    Lease,
    NeighbourReport,
    Report,
    SyncReply,
)


@dataclass(slots=True)
class _Router:
    expires_ms: float = 0.0
    counted: int = 0  # number of its last counted report
    said: NeighbourReport | None = None


@dataclass(slots=True)
class _Tenant:
    window: Window
    in_flight: dict[str, int] = field(default_factory=dict)  # tokens by router


class EmbeddedStore(RedisStore):
    """A store that lives as long as the process. `clock_ms` is any monotonic clock."""

    def __init__(self, clock_ms: Callable[[], float], *, window_ms: int = WINDOW_MS, ttl_ms: int = TTL_MS) -> None:
        self._model_ms = clock_ms
        self._window_ms = window_ms
        self._ttl_ms = ttl_ms
        self._life = secrets.token_hex(8)
        self._routers: dict[str, _Router] = {}
        self._tenants: dict[str, _Tenant] = {}
        self._leases: dict[str, tuple[float, Lease]] = {}  # (expiry in ms, lease) by address
        self._leases_version = 0
        self._convictions: dict[bytes, float] = {}  # expiry in ms by fingerprint
        self._convictions_version = 0
        self._served: dict[str, tuple[float, float]] = {}  # (cost units over weight, time in ms) by tenant

    def forget(self) -> None:
        """Begins a new life, which knows of no router and no tenant."""
        self._life = secrets.token_hex(8)
        self._routers, self._tenants = {}, {}

    async def connect(self) -> None:
        """Does nothing."""

    async def close(self) -> None:
        """Does nothing."""

    def reserve(self, ask: Ask) -> "asyncio.Future[Answer | None]":
        answer: asyncio.Future[Answer | None] = asyncio.get_running_loop().create_future()
        answer.set_result(self._reserved(ask))
        return answer

    def _reserved(self, ask: Ask) -> Answer | None:
        if ask.life != self._life:
            return None
        now_ms = self._model_ms()
        tenant = self._tenant(ask.tenant)
        tenant.window.expire(now_ms)
        # Tokens in flight of a dead router do not count. If it comes back, it reports them again.
        tenant.in_flight = {
            router: tokens for router, tokens in tenant.in_flight.items() if router == ask.router or self._lives(router)
        }
        if ask.in_flight_change:
            mine = tenant.in_flight.get(ask.router, 0)
            tenant.in_flight[ask.router] = mine + ask.in_flight_change
        in_flight = sum(max(0, tokens) for tokens in tenant.in_flight.values())
        used = Used(tenant.window.requests, tenant.window.tokens, in_flight)
        refusal = judge(ask.quotas, used, ask.tokens, tenant.window, now_ms)
        if refusal is None:
            tenant.window.add(tenant.window.bucket(now_ms), 1, ask.tokens)
            tenant.in_flight[ask.router] = tenant.in_flight.get(ask.router, 0) + ask.tokens
            used = Used(used.requests + 1, used.tokens + ask.tokens, used.in_flight + ask.tokens)
        return Answer(refusal, used, tenant.window.bucket(now_ms))

    async def sync(self, report: Report) -> SyncReply:
        if report.life != self._life:
            return SyncReply(self._life)
        now_ms = self._model_ms()
        mine = self._routers.setdefault(report.router, _Router())
        mine.expires_ms = now_ms + self._ttl_ms
        is_new = report.number > mine.counted
        if is_new:
            mine.counted = report.number
            self._count(report, now_ms)
        for name, told in report.tenants.items():
            in_flight = self._tenant(name).in_flight
            if told.in_flight is not None:
                in_flight[report.router] = told.in_flight
            elif is_new:
                in_flight[report.router] = in_flight.get(report.router, 0) + told.in_flight_change
        if report.credits is not None:
            said = mine.said or NeighbourReport(-1, {}, ())
            if mine.said is None or (said.credits, said.competing) != (report.credits, list(report.competing)):
                mine.said = NeighbourReport(report.number, dict(report.credits), list(report.competing))
        if report.leases is not None:
            self._renew(report, now_ms)
        if report.convictions:
            self._convict(report, now_ms)
        self._forget(now_ms)
        return self._answered(report, now_ms)

    def _count(self, report: Report, now_ms: float) -> None:
        for name, told in report.tenants.items():
            window = self._tenant(name).window
            window.expire(now_ms)
            for change in told.changes:
                age_ms = max(0.0, report.sent_ms - change.at_ms)
                bucket = window.bucket(now_ms - age_ms) if change.bucket is None else change.bucket
                if window.holds(bucket, now_ms):
                    window.add(bucket, change.requests, change.tokens)
        for name, amount in report.served.items():
            self._served[name] = (amount + self._served_now(name, now_ms), now_ms)

    def _renew(self, report: Report, now_ms: float) -> None:
        before = {address: lease for address, (_, lease) in self._leases.items()}
        for lease in report.leases or ():
            self._leases[lease.address] = (now_ms + self._ttl_ms, lease)
        self._leases = {address: held for address, held in self._leases.items() if held[0] > now_ms}
        if {address: lease for address, (_, lease) in self._leases.items()} != before:
            self._leases_version += 1

    def _convict(self, report: Report, now_ms: float) -> None:
        if report.convictions.keys() - self._convictions.keys():
            self._convictions_version += 1
        for fingerprint, ttl_ms in report.convictions.items():
            self._convictions[fingerprint] = max(now_ms + ttl_ms, self._convictions.get(fingerprint, 0.0))
        by_end = sorted(self._convictions.items(), key=lambda item: item[1], reverse=True)
        self._convictions = dict(by_end[:MAX_CONVICTIONS])

    def _answered(self, report: Report, now_ms: float) -> SyncReply:
        others = {
            name: router
            for name, router in self._routers.items()
            if name != report.router and router.expires_ms > now_ms
        }
        changed = {
            name: router.said
            for name, router in others.items()
            if router.said is not None and report.known.get(name) != router.said.version
        }
        leases = convictions = served = None
        if report.known_leases != self._leases_version:
            leases = [lease for _, lease in self._leases.values()]
        if report.known_convictions != self._convictions_version:
            ends = self._convictions.items()
            convictions = {fingerprint: int(end_ms - now_ms) for fingerprint, end_ms in ends if end_ms > now_ms}
        if report.wants_served:
            now = {name: self._served_now(name, now_ms) for name in self._served}
            most = sorted(now.items(), key=lambda item: item[1], reverse=True)[:MAX_TENANTS]
            served = {name: amount for name, amount in most if amount >= 1}
            self._served = {name: (amount, now_ms) for name, amount in served.items()}
        return SyncReply(
            life=self._life,
            routers=tuple(others),
            changed=changed,
            leases=leases,
            leases_version=self._leases_version,
            convictions=convictions,
            convictions_version=self._convictions_version,
            served=served,
        )

    def _forget(self, now_ms: float) -> None:
        """Drops expired entries, so that memory use stays bounded."""
        for name, router in list(self._routers.items()):
            if router.expires_ms <= now_ms:
                router.said = None
            if router.expires_ms + KEEP_MS < now_ms:
                del self._routers[name]
        if len(self._tenants) > 2 * MAX_TENANTS:
            for name, tenant in list(self._tenants.items()):
                tenant.window.expire(now_ms)
                if not tenant.window and not any(tenant.in_flight.values()):
                    del self._tenants[name]

    def _tenant(self, name: str) -> _Tenant:
        if name not in self._tenants:
            self._tenants[name] = _Tenant(Window(self._window_ms))
        return self._tenants[name]

    def _lives(self, router: str) -> bool:
        return router in self._routers and self._routers[router].expires_ms > self._model_ms()

    def _served_now(self, name: str, now_ms: float) -> float:
        amount, as_of_ms = self._served.get(name, (0.0, now_ms))
        return decayed(amount, now_ms - as_of_ms, HALF_LIFE_MS)

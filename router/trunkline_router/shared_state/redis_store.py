"""Shared state in Redis, 6.2 or newer.

| key | type | holds |
|---|---|---|
| `{prefix}:life` | string | the name of the store's present life |
| `{prefix}:routers` | hash | router → when it is taken for dead, and how many of its reports were counted |
| `{prefix}:credits` | hash | router → version, and its credits by worker with its competing tenants, as JSON |
| `{prefix}:versions` | hash | how often leases and convictions have changed |
| `{prefix}:leases` | hash | a worker's address → when it expires, worker id, epoch, model |
| `{prefix}:convictions` | sorted set | fingerprint in hex, by when it expires |
| `{prefix}:served` | hash | tenant → decayed cost units over weight, and when they were so many |
| `{prefix}:window:<tenant>` | hash | what the tenant was admitted with, by bucket of time |
| `{prefix}:flight:<tenant>` | hash | router → tokens that its running requests of the tenant may use |

The braces are Redis Cluster's hash tag: all keys lie in one slot, as scripts demand. Times are the server's (TIME, in
milliseconds). Everything expires by itself; a fleet that is gone leaves nothing.

The scripts are `reserve.lua` and `sync.lua`, each behind `window.lua`. They are called by their hash (EVALSHA, no
FUNCTION: 6.2 has none), with their text where Redis has forgotten them.
"""

import asyncio
import json
import secrets
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from trunkline_router.shared_state.fairness import HALF_LIFE_MS, MAX_TENANTS
from trunkline_router.shared_state.quota import IN_FLIGHT_RETRY_MS, WINDOW_MS, Refusal, Used
from trunkline_router.shared_state.redis_connection import RedisConnection, Script
from trunkline_router.shared_state.store import (
    KEEP_MS,
    MAX_CONVICTIONS,
    TTL_MS,
    Answer,
    Ask,
    Credit,
    Lease,
    LifeEnded,
    News,
    Report,
    RouterNews,
    StoreDown,
    WindowChange,
    WorkerKey,
)

SYNC_TIMEOUT_S, SYNC_SLICES = 0.25, 5  # nobody's request waits for it
UNCHANGED = -1

FIXED_KEYS = ("life", "routers", "credits", "versions", "leases", "convictions", "served")
SCRIPTS = ("reserve.lua", "sync.lua")


class RedisStore:
    """See the module. `clock_ms` replaces the server's time, for tests."""

    def __init__(
        self,
        url: str,
        prefix: str,
        *,
        window_ms: int = WINDOW_MS,
        ttl_ms: int = TTL_MS,
        clock_ms: Callable[[], float] | None = None,
    ) -> None:
        window, *scripts = (Path(__file__).with_name(name).read_text() for name in ("window.lua", *SCRIPTS))
        self._reserve, self._sync = (Script(window + text) for text in scripts)
        self._redis = RedisConnection(url, (self._reserve, self._sync))
        self._tag = "{" + prefix.rstrip(":") + "}:"
        self._fixed_keys = [self._tag + name for name in FIXED_KEYS]
        self._window_ms = window_ms
        self._ttl_ms = ttl_ms
        self._clock_ms = clock_ms

    async def connect(self) -> None:
        if not self._redis.is_connected:
            await self._redis.connect()

    async def close(self) -> None:
        await self._redis.close()

    def reserve(self, ask: Ask) -> "asyncio.Future[Answer]":
        quotas = ask.quotas
        limits = (quotas.requests_per_minute, quotas.tokens_per_minute, quotas.tokens_in_flight)
        reply = self._redis.call(
            self._reserve,
            (*self._fixed_keys[:2], *self._tenant_keys(ask.tenant)),
            (
                ask.life,
                self._now(),
                self._window_ms,
                ask.router,
                ask.tokens,
                ask.in_flight,
                *("" if limit is None else limit for limit in limits),
                IN_FLIGHT_RETRY_MS,
                "" if ask.refused is None else ask.refused,
            ),
        )
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        reply.add_done_callback(partial(_pass_on, answer))
        return answer

    async def sync(self, report: Report) -> News:
        said, tenants = self._written(report)
        keys = [*self._fixed_keys, *(key for tenant in tenants for key in self._tenant_keys(tenant))]
        reply = self._redis.call(self._sync, keys, (json.dumps(said), self._now()))
        for _ in range(SYNC_SLICES):  # as with a request's patience: a busy loop of ours is not the server's fault
            if reply.done():
                break
            await asyncio.wait((reply,), timeout=SYNC_TIMEOUT_S / SYNC_SLICES)
        try:
            if not reply.done():
                raise StoreDown(f"no answer within {SYNC_TIMEOUT_S:g} s")
            return _news(json.loads(reply.result()))
        except StoreDown:
            # What comes on this connection now comes too late; and a server that says no (a replica now, or full) may
            # not be the one to ask.
            await self._redis.close()
            raise

    def _written(self, report: Report) -> tuple[dict[str, Any], list[str]]:
        """The report as JSON, and the tenants whose keys it names, in their order."""
        tenants = list(dict.fromkeys((*report.windows, *report.in_flight)))
        said: dict[str, Any] = {
            "router": report.router,
            "life": report.life,
            "new_life": secrets.token_hex(8),
            "number": report.number,
            "ttl_ms": self._ttl_ms,
            "keep_ms": KEEP_MS,
            "window_ms": self._window_ms,
            "half_life_ms": HALF_LIFE_MS,
            "most_tenants": MAX_TENANTS,
            "most_convictions": MAX_CONVICTIONS,
            "tenants": [
                {
                    "changes": [_written_change(change) for change in report.windows.get(tenant, ())],
                    "in_flight": report.in_flight.get(tenant, UNCHANGED),
                }
                for tenant in tenants
            ],
            "served": dict(report.served),
            "convictions": [(fingerprint.hex(), ttl_ms) for fingerprint, ttl_ms in report.convictions.items()],
            "known": dict(report.known),
            "known_leases": report.known_leases,
            "known_convictions": report.known_convictions,
            "wants_served": report.wants_served,
        }
        if report.credits is not None:
            workers = [(key.worker_id, str(key.epoch), c.choices, c.tokens) for key, c in report.credits.items()]
            said["credits"] = json.dumps([workers, list(report.competing)])
        if report.leases is not None:
            said["leases"] = [
                (lease.address, json.dumps([lease.worker_id, str(lease.epoch), lease.model])) for lease in report.leases
            ]
        return said, tenants

    def _tenant_keys(self, tenant: str) -> tuple[str, str]:
        return f"{self._tag}window:{tenant}", f"{self._tag}flight:{tenant}"

    def _now(self) -> str:
        return "" if self._clock_ms is None else str(int(self._clock_ms()))


def _pass_on(answer: "asyncio.Future[Answer]", reply: "asyncio.Future[Any]") -> None:
    if answer.done() or reply.cancelled():
        return
    error = reply.exception()
    if error is not None:
        _fail(answer, error)
        return
    said = reply.result()
    if said[0] == "lost":
        _fail(answer, LifeEnded("the store has lost what it knew"))
        return
    quota, retry_ms, requests, tokens, in_flight, bucket = said
    refusal = None if quota == "granted" else Refusal(quota, int(retry_ms))
    answer.set_result(Answer(refusal, Used(int(requests), int(tokens), int(in_flight)), int(bucket)))


def _written_change(change: WindowChange) -> tuple[int, ...]:
    said = change.age_ms, change.requests, change.tokens
    return said if change.bucket is None else (*said, change.bucket)


def _fail(answer: "asyncio.Future[Answer]", error: BaseException) -> None:
    answer.set_exception(error)
    answer.exception()  # looked at: who has stopped waiting need not


def _news(said: dict[str, Any]) -> News:
    """JSON has one empty thing for Lua's two: where a list may be empty, so may an object be."""
    if "routers" not in said:
        return News(said["life"])
    leases, convictions, served = said.get("leases"), said.get("convictions"), said.get("served")
    return News(
        life=said["life"],
        routers=tuple(said["routers"] or ()),
        changed={name: _router_news(int(version), text) for name, version, text in said["changed"] or ()},
        leases=None if leases is None else [_lease(address, text) for address, text in leases or ()],
        leases_version=said["leases_version"],
        convictions=None
        if convictions is None
        else {bytes.fromhex(name): int(ttl_ms) for name, ttl_ms in convictions or ()},
        convictions_version=said["convictions_version"],
        served=None if served is None else dict(served or ()),
    )


def _router_news(version: int, text: str) -> RouterNews:
    workers, competing = json.loads(text)
    credits = {WorkerKey(name, int(epoch)): Credit(choices, tokens) for name, epoch, choices, tokens in workers}
    return RouterNews(version, credits, competing)


def _lease(address: str, text: str) -> Lease:
    worker_id, epoch, model = json.loads(text)
    return Lease(address, worker_id, int(epoch), model)

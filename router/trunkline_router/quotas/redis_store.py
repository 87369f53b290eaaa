"""Shared state in Redis 6.2 or newer with a single primary. Redis Cluster is not supported and would not help, because
every script needs several of the keys at once.

| key | type | holds |
|---|---|---|
| `{prefix}:life` | string | the store's current life: its name, @, and the server's run id |
| `{prefix}:convictions` | sorted set | fingerprint in hex, by expiry; convictions outlive a life |
| `{prefix}:<life>:routers` | hash | router → expiry, version of its credits, number of its last counted report |
| `{prefix}:<life>:credits` | hash | router → version, then credits by worker and competing tenants as JSON |
| `{prefix}:<life>:versions` | hash | how often leases and convictions have changed |
| `{prefix}:<life>:leases` | hash | worker address → expiry, worker id, epoch, model |
| `{prefix}:<life>:served` | hash | tenant → decayed cost units over weight, and the time of that value |
| `{prefix}:<life>:window:<tenant>` | hash | the tenant's admitted requests and tokens by time bucket |
| `{prefix}:<life>:flight:<tenant>` | hash | router → tokens that its running requests of the tenant may use |

The braces are a hash tag: a proxy that spreads keys over servers keeps a fleet's keys together. Times are the server's
(TIME, in milliseconds). All keys expire, so a fleet that is gone leaves nothing behind.

`{prefix}` stands for the fleet's prefix and the format number (redis_entries.py), so routers of different formats use
different keys. From an older life, a new one inherits only convictions.

The scripts are `reserve.lua` and `sync.lua`, each preceded by `window.lua`. They are called by hash (EVALSHA, because
Redis 6.2 has no FUNCTION), and by source if Redis has lost them.
"""

import asyncio
import hashlib
import json
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from trunkline_router.quotas.convictions import CONVICTION_MS
from trunkline_router.quotas.fairness import HALF_LIFE_MS, MAX_TENANTS
from trunkline_router.quotas.quota import IN_FLIGHT_RETRY_MS, WINDOW_MS, Refusal, Used
from trunkline_router.quotas.redis_connection import CONNECT_TIMEOUT_S, NO_EVICTION, RedisConnection, Script
from trunkline_router.quotas.redis_entries import (
    DECODE_ERRORS,
    FORMAT,
    LONGEST_NAME,
    MOST_CREDIT_BYTES,
    EntryReader,
    written_credits,
    written_lease,
)
from trunkline_router.quotas.redis_url import PUBLIC_AUTHORITIES, RedisTls
from trunkline_router.quotas.store import (
    KEEP_MS,
    MAX_CONVICTIONS,
    TTL_MS,
    Answer,
    Ask,
    LifeEnded,
    Report,
    StoreDown,
    SyncReply,
    WindowChange,
)
from trunkline_router.quotas.store_link import PATIENCE_S
from trunkline_runtime.log import get_logger
from trunkline_runtime.telemetry.series import BucketCounts

Entry = TypeVar("Entry")

# No request waits for a sync. The timeout of a request reflects the distance to Redis, so these are multiples of it.
SYNC_TIMEOUT_S, SYNC_TIMEOUT_FACTOR = 0.25, 4.0
CONNECT_TIMEOUT_FACTOR = 10.0  # some seven round trips, nine with TLS
TURN_S = 0.001  # of decoding a reply, after which other tasks get a turn
UNCHANGED = -1

KEYS_OF_ALL_LIVES = ("life", "convictions")
KEYS_OF_A_LIFE = ("routers", "credits", "versions", "leases", "served")
SCRIPTS = ("reserve.lua", "sync.lua")


class RedisStore:
    """The state that routers share through Redis.

    patience_s: how long a request waits for an answer
    tls: of rediss:// URLs
    clock_ms: replaces the server's time in tests
    """

    def __init__(
        self,
        url: str,
        prefix: str,
        *,
        window_ms: int = WINDOW_MS,
        ttl_ms: int = TTL_MS,
        patience_s: float = PATIENCE_S,
        tls: RedisTls = PUBLIC_AUTHORITIES,
        clock_ms: Callable[[], float] | None = None,
    ) -> None:
        window, *scripts = (Path(__file__).with_name(name).read_text() for name in ("window.lua", *SCRIPTS))
        names = (name.removesuffix(".lua") for name in SCRIPTS)
        self._reserve, self._sync = (Script(name, window + text) for name, text in zip(names, scripts, strict=True))
        connect_timeout_s = max(CONNECT_TIMEOUT_S, CONNECT_TIMEOUT_FACTOR * patience_s)
        self._redis = RedisConnection(
            url,
            (self._reserve, self._sync),
            tls=tls,
            connect_timeout_s=connect_timeout_s,
            reply_timeout_s=max(SYNC_TIMEOUT_S, SYNC_TIMEOUT_FACTOR * patience_s),
        )
        self._tag = f"{{{prefix.rstrip(':')}}}:{FORMAT}:"
        read = self._reader = EntryReader()
        self._readers: Mapping[str, Callable[[Any], Any]] = {
            "routers": lambda name: name,
            "changed": lambda entry: (entry[0], read.neighbour_report(entry[0], int(entry[1]), entry[2])),
            "leases": lambda entry: read.lease(*entry),
            "convictions": lambda entry: read.conviction(*entry),
            "served": lambda entry: read.served(*entry),
        }
        self._log = get_logger()
        self._has_warned_of_eviction = False
        self._credits = "", ""  # (router, JSON) as last written in the current life
        self._credits_are_lost = False
        self._heard_until = ""  # the router at which the next sync begins if the last one had no room for all
        self._window_ms = window_ms
        self._ttl_ms = ttl_ms
        self._clock_ms = clock_ms

    @property
    def latencies(self) -> Mapping[str, BucketCounts]:
        """Times from calls to their replies, by script."""
        return self._redis.latencies

    async def connect(self) -> None:
        """See Store. Warns once if Redis evicts keys."""
        if self._redis.is_connected:
            return
        await self._redis.connect()
        if self._redis.eviction and not self._has_warned_of_eviction:
            self._has_warned_of_eviction = True
            self._log.warning(
                "Redis evicts keys when it is full, including tenants' quotas; it should refuse writes instead",
                maxmemory_policy=self._redis.eviction,
                wanted=NO_EVICTION,
            )

    async def close(self) -> None:
        """See Store."""
        await self._redis.close()

    def reserve(self, ask: Ask) -> "asyncio.Future[Answer]":
        """See Store."""
        quotas = ask.quotas
        limits = (quotas.requests_per_minute, quotas.tokens_per_minute, quotas.tokens_in_flight)
        reply = self._redis.call(
            self._reserve,
            (f"{self._tag}life", f"{self._of(ask.life)}routers", *self._tenant_keys(ask.life, ask.tenant)),
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

    async def sync(self, report: Report) -> SyncReply:
        """See Store."""
        body, tenants = self._written(report)
        of_tenants = (key for tenant in tenants for key in self._tenant_keys(report.life, tenant))
        keys = [*self._fixed_keys(report.life), *of_tenants]
        try:
            return await self._sync_reply(await self._redis.call(self._sync, keys, (json.dumps(body), self._now())))
        except StoreDown:  # a server that refuses (it is full, or has become a replica) may be the wrong one
            await self._redis.close()
            raise

    def _written(self, report: Report) -> tuple[dict[str, Any], list[str]]:
        """The report for the script as a JSON object, and the tenants whose keys the call needs, in order."""
        tenants = list(dict.fromkeys((*report.windows, *report.in_flight)))
        body: dict[str, Any] = {
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
            "most_conviction_ms": CONVICTION_MS,
            "longest_name": LONGEST_NAME,
            "most_credit_bytes": MOST_CREDIT_BYTES,
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
            "heard_until": self._heard_until,
            "known_leases": report.known_leases,
            "known_convictions": report.known_convictions,
            "wants_served": report.wants_served,
        }
        if report.credits is not None:
            body["credits"] = written_credits(report.credits, report.competing)
            self._credits = report.router, body["credits"]
        elif self._credits[0] == report.router and self._credits_are_lost:
            body["credits"] = self._credits[1]
        elif self._credits[0] == report.router and report.wants_served:
            body["credits_digest"] = hashlib.sha1(self._credits[1].encode(), usedforsecurity=False).hexdigest()
        if report.leases is not None:
            body["leases"] = [(lease.address, written_lease(lease)) for lease in report.leases]
        return body, tenants

    async def _sync_reply(self, pieces: list[str]) -> SyncReply:
        """Decodes the script's reply piece by piece, so that other tasks run in between."""
        header = json.loads(pieces[0])
        if header.get("is_new"):
            self._credits = "", ""  # a new life has no credits
            return SyncReply(header["life"])
        self._credits_are_lost = header.get("credits_are_lost", False)
        for key in header["cleared"] or ():
            self._reader.cleared(key)
        for name in header["too_large"] or ():
            self._reader.too_large(name)
        self._heard_until = header.get("heard_until", self._heard_until)
        if "num_left" in header:
            self._reader.left_for_later(header["num_left"])
        entries: dict[str, list[Any]] = {kind: [] for kind in ("routers", "changed", "leases", "convictions", "served")}
        read_s = 0.0
        for kind, piece in zip(pieces[1::2], pieces[2::2], strict=True):
            began_s = time.perf_counter()
            entries[kind] += _known(self._readers[kind](entry) for entry in json.loads(piece))
            read_s += time.perf_counter() - began_s
            if read_s > TURN_S:
                await asyncio.sleep(0)
        return SyncReply(
            life=header["life"],
            routers=tuple(entries["routers"]),
            changed=dict(entries["changed"]),
            leases=entries["leases"] if "has_leases" in header else None,
            leases_version=header["leases_version"],
            convictions=dict(entries["convictions"]) if "has_convictions" in header else None,
            convictions_version=header["convictions_version"],
            convictions_count=header["convictions_count"],
            served=dict(entries["served"]) if "has_served" in header else None,
            read_s=read_s,
        )

    def _fixed_keys(self, life: str) -> list[str]:
        return [
            *(self._tag + name for name in KEYS_OF_ALL_LIVES),
            *(self._of(life) + name for name in KEYS_OF_A_LIFE),
        ]

    def _tenant_keys(self, life: str, tenant: str) -> tuple[str, str]:
        return f"{self._of(life)}window:{tenant}", f"{self._of(life)}flight:{tenant}"

    def _of(self, life: str) -> str:
        return f"{self._tag}{life.partition('@')[0]}:"

    def _now(self) -> str:
        return "" if self._clock_ms is None else str(int(self._clock_ms()))


def _pass_on(answer: "asyncio.Future[Answer]", reply: "asyncio.Future[Any]") -> None:
    if answer.done() or reply.cancelled():
        return
    error = reply.exception()
    if error is not None:
        _fail(answer, error)
        return
    values = reply.result()
    try:
        if values[0] == "lost":
            _fail(answer, LifeEnded("the store has lost its state"))
            return
        quota, retry_ms, requests, tokens, in_flight, bucket = values
        refusal = None if quota == "granted" else Refusal(quota, int(retry_ms))
        answer.set_result(Answer(refusal, Used(int(requests), int(tokens), int(in_flight)), int(bucket)))
    except DECODE_ERRORS as error:
        _fail(answer, StoreDown(f"an invalid answer: {error}"))


def _written_change(change: WindowChange) -> tuple[int, ...]:
    values = change.age_ms, change.requests, change.tokens
    return values if change.bucket is None else (*values, change.bucket)


def _fail(answer: "asyncio.Future[Answer]", error: BaseException) -> None:
    answer.set_exception(error)
    answer.exception()  # marks it as retrieved, because the caller may have stopped waiting


def _known(entries: Iterable[Entry | None]) -> list[Entry]:
    return [entry for entry in entries if entry is not None]

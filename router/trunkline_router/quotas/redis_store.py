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
Redis 6.2 has no FUNCTION); if Redis has lost them, the router connects anew.
"""

import asyncio
import json
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from trunkline_router.quotas.convictions import CONVICTION_MS
from trunkline_router.quotas.fairness import HALF_LIFE_MS, MAX_TENANTS
from trunkline_router.quotas.quota import IN_FLIGHT_RETRY_MS, WINDOW_MS, Refusal, Used
from trunkline_router.quotas.redis_connection import CONNECT_TIMEOUT_S, REPLY_TIMEOUT_S, RedisConnection, Script
from trunkline_router.quotas.redis_entries import (
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
    PATIENCE_S,
    TTL_MS,
    Answer,
    Ask,
    Report,
    SyncReply,
    TenantReport,
)
from trunkline_runtime.telemetry.series import BucketCounts

Entry = TypeVar("Entry")

# The timeout of a request reflects the distance to Redis, so these are multiples of it.
REPLY_TIMEOUT_FACTOR = 4.0
CONNECT_TIMEOUT_FACTOR = 10.0  # some seven round trips, nine with TLS
TURN_S = 0.001  # of decoding a reply, after which other tasks get a turn

KEYS_OF_ALL_LIVES = ("life", "convictions")
KEYS_OF_A_LIFE = ("routers", "credits", "versions", "leases", "served")


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
        patience_s: float = PATIENCE_S,
        tls: RedisTls = PUBLIC_AUTHORITIES,
        clock_ms: Callable[[], float] | None = None,
    ) -> None:
        window, reserve, sync = (
            Path(__file__).with_name(name).read_text() for name in ("window.lua", "reserve.lua", "sync.lua")
        )
        self._reserve, self._sync = Script("reserve", window + reserve, _answer), Script("sync", window + sync)
        self._redis = RedisConnection(
            url,
            (self._reserve, self._sync),
            tls=tls,
            connect_timeout_s=max(CONNECT_TIMEOUT_S, CONNECT_TIMEOUT_FACTOR * patience_s),
            reply_timeout_s=max(REPLY_TIMEOUT_S, REPLY_TIMEOUT_FACTOR * patience_s),
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
        self._heard_until = ""  # the router at which the next sync begins if the last one had no room for all
        self._window_ms = window_ms
        self._clock_ms = clock_ms

    @property
    def latencies(self) -> Mapping[str, BucketCounts]:
        """Times from calls to their replies, by script."""
        return self._redis.latencies

    async def connect(self) -> None:
        """Connects if necessary. Raises StoreDown."""
        if not self._redis.is_connected:
            await self._redis.connect()

    async def close(self) -> None:
        """Closes the connection. Open calls fail."""
        await self._redis.close()

    def reserve(self, ask: Ask) -> "asyncio.Future[Answer | None]":
        """Counts a request if its tenant's quotas allow it, in one round trip. The future gets the answer even if its
        caller has stopped waiting; None if the store has lost its state and counted nothing. It fails with
        StoreDown."""
        quotas = ask.quotas
        limits = (quotas.requests_per_minute, quotas.tokens_per_minute, quotas.tokens_in_flight)
        return self._redis.call(
            self._reserve,
            (f"{self._tag}life", f"{self._of(ask.life)}routers", *self._tenant_keys(ask.life, ask.tenant)),
            (
                ask.life,
                self._now(),
                self._window_ms,
                ask.router,
                ask.tokens,
                ask.in_flight_change,
                *("" if limit is None else limit for limit in limits),
                IN_FLIGHT_RETRY_MS,
            ),
        )

    async def sync(self, report: Report) -> SyncReply:
        """Sends a report and returns what is new. Raises StoreDown."""
        of_tenants = (key for tenant in report.tenants for key in self._tenant_keys(report.life, tenant))
        keys, body = [*self._fixed_keys(report.life), *of_tenants], json.dumps(self._written(report))
        return await self._sync_reply(await self._redis.call(self._sync, keys, (body, self._now())))

    def _written(self, report: Report) -> dict[str, Any]:
        """The report for the script as a JSON object."""
        body: dict[str, Any] = {
            "router": report.router,
            "life": report.life,
            "new_life": secrets.token_hex(8),
            "number": report.number,
            "ttl_ms": TTL_MS,
            "keep_ms": KEEP_MS,
            "window_ms": self._window_ms,
            "half_life_ms": HALF_LIFE_MS,
            "most_tenants": MAX_TENANTS,
            "most_convictions": MAX_CONVICTIONS,
            "most_conviction_ms": CONVICTION_MS,
            "longest_name": LONGEST_NAME,
            "most_credit_bytes": MOST_CREDIT_BYTES,
            "tenants": [_written_tenant(tenant, report.sent_ms) for tenant in report.tenants.values()],
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
        if report.leases is not None:
            body["leases"] = [(lease.address, written_lease(lease)) for lease in report.leases]
        return body

    async def _sync_reply(self, pieces: list[str]) -> SyncReply:
        """Decodes the script's reply piece by piece, so that other tasks run in between."""
        header = json.loads(pieces[0])
        for event, entry in header["notes"] or ():
            self._reader.warn(event, entry)
        if header.get("is_new"):
            return SyncReply(header["life"])
        self._heard_until = header.get("heard_until", self._heard_until)
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


def _answer(reply: Any) -> Answer | None:
    if reply == ["lost"]:
        return None
    quota, retry_ms, requests, tokens, in_flight, bucket = reply
    refusal = None if quota == "granted" else Refusal(quota, int(retry_ms))
    return Answer(refusal, Used(int(requests), int(tokens), int(in_flight)), int(bucket))


def _written_tenant(tenant: TenantReport, sent_ms: float) -> dict[str, Any]:
    changes = [
        (max(0, int(sent_ms - change.at_ms)), change.requests, change.tokens, change.bucket)
        for change in tenant.changes
    ]
    return {"changes": changes, "in_flight_change": tenant.in_flight_change, "in_flight": tenant.in_flight}


def _known(entries: Iterable[Entry | None]) -> list[Entry]:
    return [entry for entry in entries if entry is not None]

"""Shared state in Redis, 6.2 or newer, with one primary. Redis Cluster is not followed: there would be nothing to
spread, since every script needs several of the keys at once.

| key | type | holds |
|---|---|---|
| `{prefix}:life` | string | the store's present life: its name, @, and the server's run id |
| `{prefix}:convictions` | sorted set | fingerprint in hex, by when it expires; those of an older life are true too |
| `{prefix}:<life>:routers` | hash | router → when it is taken for dead, version of its credits, reports counted |
| `{prefix}:<life>:credits` | hash | router → version, and its credits by worker with its competing tenants, as JSON |
| `{prefix}:<life>:versions` | hash | how often leases and convictions have changed |
| `{prefix}:<life>:leases` | hash | a worker's address → when it expires, worker id, epoch, model |
| `{prefix}:<life>:served` | hash | tenant → decayed cost units over weight, and when they were so many |
| `{prefix}:<life>:window:<tenant>` | hash | what the tenant was admitted with, by bucket of time |
| `{prefix}:<life>:flight:<tenant>` | hash | router → tokens that its running requests of the tenant may use |

The braces keep a fleet's keys together where a proxy spreads keys over servers. Times are the server's (TIME, in
milliseconds). Everything expires by itself; a fleet that is gone leaves nothing.

`{prefix}` stands for the fleet's prefix and the number of the format (redis_entries.py): routers of different formats
share nothing, and do not harm each other either. A new life has nothing but convictions of what an
older one left.

The scripts are `reserve.lua` and `sync.lua`, each behind `window.lua`. They are called by their hash (EVALSHA, no
FUNCTION: 6.2 has none), with their text where Redis has forgotten them.
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

from trunkline_router.quotas.fairness import HALF_LIFE_MS, MAX_TENANTS
from trunkline_router.quotas.quota import IN_FLIGHT_RETRY_MS, WINDOW_MS, Refusal, Used
from trunkline_router.stores.convictions import CONVICTION_MS
from trunkline_router.stores.redis_connection import CONNECT_TIMEOUT_S, NO_EVICTION, RedisConnection, Script
from trunkline_router.stores.redis_entries import (
    FORMAT,
    LONGEST_NAME,
    MOST_CREDIT_BYTES,
    NONSENSE,
    EntryReader,
    written_credits,
    written_lease,
)
from trunkline_router.stores.store import (
    KEEP_MS,
    MAX_CONVICTIONS,
    TTL_MS,
    Answer,
    Ask,
    LifeEnded,
    News,
    Report,
    StoreDown,
    WindowChange,
)
from trunkline_router.stores.store_link import PATIENCE_S
from trunkline_runtime.log import get_logger

Entry = TypeVar("Entry")

# Nobody's request waits for a sync. What a request waits says how far away Redis is: these get a multiple of it.
SYNC_TIMEOUT_S, SYNC_PATIENCES, SYNC_SLICES = 0.25, 4.0, 5
CONNECT_PATIENCES = 10.0  # some seven round trips, with TLS nine
TURN_S = 0.001  # of reading what others have said, after which whatever else is due has its turn
UNCHANGED = -1

KEYS_OF_ALL_LIVES = ("life", "convictions")
KEYS_OF_A_LIFE = ("routers", "credits", "versions", "leases", "served")
SCRIPTS = ("reserve.lua", "sync.lua")


class RedisStore:
    """See the module.

    patience_s: how long a request waits for an answer
    clock_ms: replaces the server's time, for tests
    """

    def __init__(
        self,
        url: str,
        prefix: str,
        *,
        window_ms: int = WINDOW_MS,
        ttl_ms: int = TTL_MS,
        patience_s: float = PATIENCE_S,
        clock_ms: Callable[[], float] | None = None,
    ) -> None:
        window, *scripts = (Path(__file__).with_name(name).read_text() for name in ("window.lua", *SCRIPTS))
        self._reserve, self._sync = (Script(window + text) for text in scripts)
        self._sync_timeout_s = max(SYNC_TIMEOUT_S, SYNC_PATIENCES * patience_s)
        connect_timeout_s = max(CONNECT_TIMEOUT_S, CONNECT_PATIENCES * patience_s)
        self._redis = RedisConnection(url, (self._reserve, self._sync), connect_timeout_s=connect_timeout_s)
        self._tag = f"{{{prefix.rstrip(':')}}}:{FORMAT}:"
        read = self._reader = EntryReader()
        self._readers: Mapping[str, Callable[[Any], Any]] = {
            "routers": lambda name: name,
            "changed": lambda entry: (entry[0], read.router_news(entry[0], int(entry[1]), entry[2])),
            "leases": lambda entry: read.lease(*entry),
            "convictions": lambda entry: read.conviction(*entry),
            "served": lambda entry: read.served(*entry),
        }
        self._log = get_logger()
        self._said_eviction = False
        self._credits = "", ""  # whose, as they were last written for the present life
        self._credits_are_lost = False
        self._heard_until = ""  # the router with which the next sync begins, where one had no room for all
        self._window_ms = window_ms
        self._ttl_ms = ttl_ms
        self._clock_ms = clock_ms

    async def connect(self) -> None:
        if self._redis.is_connected:
            return
        await self._redis.connect()
        if self._redis.eviction and not self._said_eviction:
            self._said_eviction = True
            self._log.warning(
                "Redis evicts keys when it is full, and tenants' quotas with them; it should refuse to write instead",
                maxmemory_policy=self._redis.eviction,
                wanted=NO_EVICTION,
            )

    async def close(self) -> None:
        await self._redis.close()

    def reserve(self, ask: Ask) -> "asyncio.Future[Answer]":
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

    async def sync(self, report: Report) -> News:
        said, tenants = self._written(report)
        of_tenants = (key for tenant in tenants for key in self._tenant_keys(report.life, tenant))
        keys = [*self._fixed_keys(report.life), *of_tenants]
        reply = self._redis.call(self._sync, keys, (json.dumps(said), self._now()))
        for _ in range(SYNC_SLICES):  # as with a request's patience: a busy loop of ours is not the server's fault
            if reply.done():
                break
            await asyncio.wait((reply,), timeout=self._sync_timeout_s / SYNC_SLICES)
        try:
            if not reply.done():
                raise StoreDown(f"no answer within {self._sync_timeout_s:g} s")
            return await self._news(reply.result())
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
            said["credits"] = written_credits(report.credits, report.competing)
            self._credits = report.router, said["credits"]
        elif self._credits[0] == report.router and self._credits_are_lost:
            said["credits"] = self._credits[1]
        elif self._credits[0] == report.router and report.wants_served:
            said["credits_digest"] = hashlib.sha1(self._credits[1].encode(), usedforsecurity=False).hexdigest()
        if report.leases is not None:
            said["leases"] = [(lease.address, written_lease(lease)) for lease in report.leases]
        return said, tenants

    async def _news(self, pieces: list[str]) -> News:
        """What the script says, read a piece at a time: others have their turn in between."""
        said = json.loads(pieces[0])
        if said.get("is_new"):
            self._credits = "", ""  # a life that has none of them
            return News(said["life"])
        self._credits_are_lost = said.get("credits_are_lost", False)
        for key in said["cleared"] or ():
            self._reader.cleared(key)
        for name in said["too_large"] or ():
            self._reader.too_large(name)
        self._heard_until = said.get("heard_until", self._heard_until)
        if "num_left" in said:
            self._reader.left_for_later(said["num_left"])
        told: dict[str, list[Any]] = {kind: [] for kind in ("routers", "changed", "leases", "convictions", "served")}
        read_s = 0.0
        for kind, piece in zip(pieces[1::2], pieces[2::2], strict=True):
            began_s = time.perf_counter()
            told[kind] += _known(self._readers[kind](entry) for entry in json.loads(piece))
            read_s += time.perf_counter() - began_s
            if read_s > TURN_S:
                await asyncio.sleep(0)
        return News(
            life=said["life"],
            routers=tuple(told["routers"]),
            changed=dict(told["changed"]),
            leases=told["leases"] if "has_leases" in said else None,
            leases_version=said["leases_version"],
            convictions=dict(told["convictions"]) if "has_convictions" in said else None,
            convictions_version=said["convictions_version"],
            convictions_count=said["convictions_count"],
            served=dict(told["served"]) if "has_served" in said else None,
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
    said = reply.result()
    try:
        if said[0] == "lost":
            _fail(answer, LifeEnded("the store has lost what it knew"))
            return
        quota, retry_ms, requests, tokens, in_flight, bucket = said
        refusal = None if quota == "granted" else Refusal(quota, int(retry_ms))
        answer.set_result(Answer(refusal, Used(int(requests), int(tokens), int(in_flight)), int(bucket)))
    except NONSENSE as error:
        _fail(answer, StoreDown(f"an answer that makes no sense: {error}"))


def _written_change(change: WindowChange) -> tuple[int, ...]:
    said = change.age_ms, change.requests, change.tokens
    return said if change.bucket is None else (*said, change.bucket)


def _fail(answer: "asyncio.Future[Answer]", error: BaseException) -> None:
    answer.set_exception(error)
    answer.exception()  # looked at: who has stopped waiting need not


def _known(entries: Iterable[Entry | None]) -> list[Entry]:
    return [entry for entry in entries if entry is not None]

"""What the router's other parts see of the shared state.

On a request's path stands one call, `reserve`, and only for tenants with quotas; it waits 5 ms at most and never
fails because of the store. Everything else goes to and fro in the background (`run`), every 20 ms while there is news
and once a second where there is none; the rest of the router reads what came last.

When the store is lost, requests are judged by this router's own book (or refused, where that was chosen). When it is
back it is told what it missed; when it is back empty it is told everything.
"""

import asyncio
import secrets
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from random import Random
from typing import Protocol

from trunkline.status import CODE_RESOURCE_EXHAUSTED, QUOTA_EXCEEDED, RequestRefused
from trunkline_router.shared_state.breaker import Breaker
from trunkline_router.shared_state.fairness import HALF_LIFE_MS, decayed, weight_factor
from trunkline_router.shared_state.quota import WINDOW_MS, Quotas, Refusal
from trunkline_router.shared_state.quota_book import OUTPUT_MARGIN, QuotaBook, TenantBook
from trunkline_router.shared_state.reservation import Reservation
from trunkline_router.shared_state.store import (
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
    Store,
    StoreDown,
    WorkerKey,
)
from trunkline_runtime.log import get_logger

PATIENCE_S = 0.005  # on a request's path
# Patience is spent in slices, each of which counts for no more than its length: while this process's own loop is busy
# the question may not have left yet, or the answer may lie in the socket, and the store is not to blame.
SLICES = 5
TICK_S = 0.02
BEAT_S = 1.0
RETRY_WHEN_DOWN_MS = 1000
CONVICTION_MS = 3_600_000


class Fleet(Protocol):
    """The router's side of what is shared."""

    def credits(self) -> Mapping[WorkerKey, Credit]:
        """What this router has sent where."""
        ...

    def leases(self) -> Sequence[Lease]:
        """The workers that it is connected to."""
        ...

    def take_credits(self, others: Mapping[WorkerKey, Credit]) -> None:
        """What all other routers have sent where; workers that are not named got nothing."""
        ...

    def take_leases(self, leases: Sequence[Lease]) -> None:
        """The workers that any router is connected to."""
        ...

    def take_conviction(self, fingerprint: bytes) -> None:
        """Another router's."""
        ...


class SharedState:
    """See the module.

    admits_when_down: what happens to quotas while the store is lost
    patience_s: how long a request waits for the store
    steady_s: a clock
    """

    def __init__(
        self,
        store: Store,
        router_id: str,
        fleet: Fleet,
        rng: Random,
        *,
        admits_when_down: bool = True,
        window_ms: int = WINDOW_MS,
        patience_s: float = PATIENCE_S,
        steady_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        # A router that comes back under its name is another one: what its former life had in flight is over.
        self._name = f"{router_id}/{secrets.token_hex(4)}"
        self._fleet = fleet
        self._admits_when_down = admits_when_down
        self._patience_s = patience_s
        self._steady_s = steady_s
        self._log = get_logger()
        self._breaker = Breaker(rng)
        self._last_problem = ""
        self._life = ""
        self._entries = 0  # how often everything was told
        self._pending: Report | None = None  # sent, and perhaps counted
        self._pending_as_of_ms = 0.0
        self._number = 0
        self._beat_at_s = 0.0
        self._synced_at_s = 0.0
        self._book = QuotaBook(window_ms)
        self._open: Counter[str] = Counter()  # running requests by tenant
        self._told_credits: tuple[Mapping[WorkerKey, Credit], Sequence[str]] = {}, ()
        self._others: dict[str, RouterNews] = {}
        self._versions = (0, 0)  # of leases and convictions
        self._convictions: dict[bytes, float] = {}  # when it ends, by fingerprint
        self._new_convictions: dict[bytes, int] = {}
        self._new_served: defaultdict[str, float] = defaultdict(float)  # cost units over weight, since the last report
        self._own_served: dict[str, tuple[float, float]] = {}  # (decayed, as of)
        self._served: Mapping[str, float] = {}  # of the fleet, as it was told last
        self._competing: frozenset[str] = frozenset()  # elsewhere
        # For metrics.
        self.reserves = self.reserves_late = self.reserves_alone = self.refusals = self.syncs = 0

    @property
    def is_reachable(self) -> bool:
        return not self._breaker.is_open

    @property
    def times_lost(self) -> int:
        return self._breaker.times_opened

    @property
    def times_entered(self) -> int:
        """How often the store was empty, or new."""
        return self._entries

    # Quotas

    async def reserve(
        self,
        tenant: str,
        quotas: Quotas | None,
        *,
        weight: float,
        prompt_tokens: int,
        max_tokens: int | None,
        most_tokens: int,
        choices: int,
    ) -> Reservation:
        """Admits a request, with the most tokens that it may use; `most_tokens` bounds the output of a choice.

        Raises RequestRefused (QUOTA_EXCEEDED).
        """
        serve = partial(self._serve, tenant, weight)
        if quotas is None or quotas == Quotas():
            self._open[tenant] += 1
            return Reservation(partial(self._end, tenant), serve, 0)
        book = self._book.tenant(tenant)
        tokens = prompt_tokens + choices * (
            max_tokens if max_tokens is not None else min(int(OUTPUT_MARGIN * book.mean_output) + 1, most_tokens)
        )
        bound = quotas.largest_request()
        if bound is not None and tokens > bound[1]:
            if max_tokens is not None or prompt_tokens > bound[1]:
                raise _too_large(tenant, tokens, *bound)
            tokens = bound[1]  # an estimate is no reason to refuse
        bucket = await self._admit(tenant, quotas, book, tokens)
        self._open[tenant] += 1
        return Reservation(partial(self._settle, tenant, bucket, choices), serve, tokens)

    async def _admit(self, tenant: str, quotas: Quotas, book: TenantBook, tokens: int) -> int:
        """Returns the bucket of time that the request counts in. Raises RequestRefused."""
        self.reserves += 1
        before = book.in_flight
        book.in_flight += tokens
        asked = None
        if self.is_reachable:
            book.reported_in_flight = None
            asked = self._store.reserve(Ask(self._name, self._life, tenant, quotas, tokens, before))
        try:
            answer = await self._answer(asked) if asked is not None else None
        except asyncio.CancelledError:
            book.in_flight -= tokens
            assert asked is not None
            bucket = book.window.bucket(self._now_ms())
            asked.add_done_callback(partial(self._take_back, tenant, bucket, tokens))
            raise
        now_ms = self._now_ms()
        if answer is None:
            refused = self._judge_alone(tenant, quotas, book, tokens, now_ms)
            bucket = book.window.bucket(now_ms)
            if asked is not None:  # whether it was counted is known later; then both must say the same
                late_word = partial(self._reconcile, tenant, bucket, tokens, refused is None, self._entries)
                asked.add_done_callback(late_word)
            elif refused is None:
                self._book.tenant(tenant).report(bucket, 1, tokens)
        else:
            refused = None if answer.refusal is None else _refused(tenant, answer.refusal)
            bucket = book.window.bucket(now_ms)
        if refused is None:
            book.admit(tokens, now_ms)
        if answer is not None:
            book.hear(answer, now_ms)
        if refused is not None:
            self._book.tenant(tenant).in_flight -= tokens
            self.refusals += 1
            raise refused
        return bucket

    async def _answer(self, asked: "asyncio.Future[Answer]") -> Answer | None:
        """What the store says; None where it does not say it in time."""
        asked_s = self._steady_s()
        for _ in range(SLICES):
            if asked.done():
                break
            await asyncio.wait((asked,), timeout=self._patience_s / SLICES)
        if not asked.done():
            self.reserves_late += 1
            if self._breaker.was_late(asked_s, self._steady_s()):
                self._say_lost("no answer in time")
            return None
        try:
            answer = asked.result()
        except LifeEnded:
            self._beat_at_s = 0.0  # at the next tick it hears everything
            return None
        except StoreDown as error:
            self._lose(error)
            return None
        self._breaker.answered()
        return answer

    def _judge_alone(
        self, tenant: str, quotas: Quotas, book: TenantBook, tokens: int, now_ms: float
    ) -> RequestRefused | None:
        self.reserves_alone += 1
        if self._admits_when_down:
            refusal = book.judge_alone(quotas, tokens, len(self._others), now_ms)
            return None if refusal is None else _refused(tenant, refusal)
        return RequestRefused(
            CODE_RESOURCE_EXHAUSTED,
            QUOTA_EXCEEDED,
            f"the quotas of tenant {tenant!r} cannot be checked now",
            quota=tenant,
            retry_delay_ms=RETRY_WHEN_DOWN_MS,
        )

    def _reconcile(
        self,
        tenant: str,
        bucket: int,
        tokens: int,
        was_admitted: bool,
        entries: int,
        asked: "asyncio.Future[Answer]",
    ) -> None:
        """The store's late word on a request that was judged here meanwhile."""
        was_counted = _was_counted(asked)
        if not asked.cancelled() and asked.exception() is None:
            self._book.tenant(tenant).hear(asked.result(), self._now_ms())
        if was_admitted and not was_counted and entries == self._entries:
            self._book.tenant(tenant).report(bucket, 1, tokens)
        elif was_counted and not was_admitted:
            self._book.tenant(tenant).report(bucket, -1, -tokens)

    def _take_back(self, tenant: str, bucket: int, tokens: int, asked: "asyncio.Future[Answer]") -> None:
        """The request went away while the store was asked."""
        if _was_counted(asked):
            self._book.tenant(tenant).report(bucket, -1, -tokens)

    def _settle(self, tenant: str, bucket: int, choices: int, reservation: Reservation) -> None:
        self._end(tenant, reservation)
        book, now_ms = self._book.tenant(tenant), self._now_ms()
        book.in_flight -= reservation.tokens
        if reservation.is_charged_in_full:
            return
        used = reservation.used_tokens
        if not used:  # nobody served it: that is not the tenant's
            book.correct(bucket, -1, -reservation.tokens, now_ms)
            return
        book.learn_output(reservation.output_tokens / choices)
        unused = reservation.tokens - used
        if unused > 0:
            book.correct(bucket, 0, -unused, now_ms)
        elif unused < 0:
            book.correct(book.window.bucket(now_ms), 0, -unused, now_ms)

    def _end(self, tenant: str, reservation: Reservation) -> None:
        self._open[tenant] -= 1
        if not self._open[tenant]:
            del self._open[tenant]

    # Fairness

    def weight_factor(self, tenant: str) -> float:
        """What to multiply the weight of a tenant by, so that it gets its share of the fleet."""
        return weight_factor(tenant, self._served, self._competing | self._open.keys())

    def _serve(self, tenant: str, weight: float, cost: float) -> None:
        self._new_served[tenant] += cost / weight

    # Convictions

    def convict(self, fingerprint: bytes, ttl_ms: int = CONVICTION_MS) -> None:
        """No router of the fleet admits this request any more: here at once, elsewhere with the next news."""
        self._convictions[fingerprint] = self._now_ms() + ttl_ms
        self._new_convictions[fingerprint] = ttl_ms
        self._bound_convictions()

    def is_convicted(self, fingerprint: bytes) -> bool:
        return self._convictions.get(fingerprint, 0.0) > self._now_ms()

    def _bound_convictions(self) -> None:
        if len(self._convictions) > MAX_CONVICTIONS:
            by_end = sorted(self._convictions.items(), key=lambda item: item[1], reverse=True)
            self._convictions = dict(by_end[:MAX_CONVICTIONS])

    # In the background

    async def start(self) -> None:
        """Tries the store once, so that the first request finds it. Does not fail where it is not there."""
        await self._probe()

    async def run(self) -> None:
        """Keeps the store and this router informed of each other; forever."""
        while True:
            if self._breaker.is_open:
                await asyncio.sleep(self._breaker.probe_in_s(self._steady_s()))
                await self._probe()
            else:
                await asyncio.sleep(TICK_S)
                await self._tick()
            self._forget_silent()

    async def close(self) -> None:
        """Says goodbye as far as that goes: the last settlements are told."""
        if self.is_reachable:
            await self._tick()
        await self._store.close()

    async def _probe(self) -> None:
        try:
            await self._store.connect()
            await self._sync(is_beat=True)
        except StoreDown as error:
            self._breaker.probe_failed(self._steady_s())
            self._say_lost(str(error))
        else:
            self._breaker.probe_succeeded(self._steady_s())
            if self._last_problem:
                self._log.info("shared state back", times_entered=self._entries)
                self._last_problem = ""

    async def _tick(self) -> None:
        """Tells and hears, where there is anything to tell or the time has come."""
        is_beat = self._steady_s() >= self._beat_at_s
        has_news = self._pending is not None or self._book.has_news or self._new_convictions
        if not (is_beat or has_news or self._own_credits() != self._told_credits):
            return
        try:
            await self._sync(is_beat)
        except StoreDown as error:
            self._lose(error)

    def _lose(self, error: StoreDown) -> None:
        if self._breaker.broke(self._steady_s()):
            self._say_lost(str(error))

    def _say_lost(self, problem: str) -> None:
        if not self._last_problem:  # one line per change, not per try
            policy = "open" if self._admits_when_down else "closed"
            self._log.warning("shared state lost", problem=problem, quotas=policy)
        self._last_problem = problem

    async def _sync(self, is_beat: bool) -> None:
        """Raises StoreDown."""
        now_ms = self._now_ms()
        if self._pending is None:
            self._pending = self._report(is_beat)
        else:  # perhaps it was counted; if not, it is older now
            self._pending = self._pending.aged(int(now_ms - self._pending_as_of_ms))
        self._pending_as_of_ms = now_ms
        report = self._pending
        news = await self._store.sync(report)
        if news.life != report.life:
            self._life = ""  # until it knows everything it is not asked
            self._others, self._versions, self._told_credits = {}, (0, 0), ({}, ())
            self._pending = report = self._full_report(news.life)
            news = await self._store.sync(report)
            if news.life != report.life:
                raise StoreDown("the store was lost again while it was told everything")
        self._pending = None
        self._life = news.life
        self.syncs += 1
        self._synced_at_s = self._steady_s()
        self._take(news)

    def _report(self, is_beat: bool) -> Report:
        now_ms = self._now_ms()
        self._number += 1
        if is_beat:
            self._beat_at_s = self._steady_s() + BEAT_S
            self._book.forget_idle(now_ms)
        credits = self._own_credits()
        windows = self._book.changes(now_ms)
        report = Report(
            router=self._name,
            life=self._life,
            number=self._number,
            windows=windows,
            in_flight=self._book.in_flight(all_of_them=is_beat),
            served=self._take_served(now_ms),
            credits=None if credits == self._told_credits else credits[0],
            competing=credits[1],
            leases=self._fleet.leases() if is_beat else None,
            convictions=self._new_convictions,
            known={name: news.version for name, news in self._others.items()},
            known_leases=self._versions[0],
            known_convictions=self._versions[1],
            wants_served=is_beat,
        )
        self._told_credits = credits
        self._new_convictions = {}
        return report

    def _full_report(self, life: str) -> Report:
        """For a store that knows nothing of this router."""
        now_ms = self._now_ms()
        self._number += 1
        self._entries += 1
        self._take_served(now_ms)
        self._told_credits = self._own_credits()
        self._new_convictions = {}
        return Report(
            router=self._name,
            life=life,
            number=self._number,
            windows=self._book.everything(now_ms),
            in_flight=self._book.in_flight(all_of_them=True),
            served={
                tenant: decayed(amount, now_ms - as_of_ms, HALF_LIFE_MS)
                for tenant, (amount, as_of_ms) in self._own_served.items()
            },
            credits=self._told_credits[0],
            competing=self._told_credits[1],
            leases=self._fleet.leases(),
            convictions={name: int(end_ms - now_ms) for name, end_ms in self._convictions.items() if end_ms > now_ms},
            wants_served=True,
        )

    def _take_served(self, now_ms: float) -> dict[str, float]:
        """What was served since the last report; taken as told from here on."""
        served = dict(self._new_served)
        self._new_served.clear()
        own = {
            tenant: (kept, now_ms)
            for tenant, (amount, as_of_ms) in self._own_served.items()
            if (kept := decayed(amount, now_ms - as_of_ms, HALF_LIFE_MS)) >= 1
        }
        for tenant, amount in served.items():
            own[tenant] = own.get(tenant, (0.0, now_ms))[0] + amount, now_ms
        self._own_served = own
        return served

    def _take(self, news: News) -> None:
        others = {name: said for name, said in self._others.items() if name in news.routers} | dict(news.changed)
        if news.changed or len(others) != len(self._others):
            self._others = others
            self._tell_credits()
        if news.leases is not None:
            self._fleet.take_leases(news.leases)
        if news.convictions is not None:
            now_ms = self._now_ms()
            new = {name: now_ms + ttl_ms for name, ttl_ms in news.convictions.items()}
            for fingerprint in new.keys() - self._convictions.keys():
                self._fleet.take_conviction(fingerprint)
            self._convictions = {name: end for name, end in self._convictions.items() if end > now_ms} | new
            self._bound_convictions()
        if news.served is not None:
            self._served = news.served
        self._versions = news.leases_version, news.convictions_version

    def _tell_credits(self) -> None:
        sums: dict[WorkerKey, Credit] = {}
        for other in self._others.values():
            for key, credit in other.credits.items():
                before = sums.get(key, Credit(0, 0))
                sums[key] = Credit(before.choices + credit.choices, before.tokens + credit.tokens)
        self._competing = frozenset(tenant for other in self._others.values() for tenant in other.competing)
        self._fleet.take_credits(sums)

    def _forget_silent(self) -> None:
        """What others had in flight when they were last heard says nothing after a while."""
        if self._others and self._steady_s() - self._synced_at_s > TTL_MS / 1e3:
            self._others = {}
            self._tell_credits()

    def _own_credits(self) -> tuple[Mapping[WorkerKey, Credit], Sequence[str]]:
        return self._fleet.credits(), sorted(self._open)

    def _now_ms(self) -> float:
        return self._steady_s() * 1e3


def _was_counted(asked: "asyncio.Future[Answer]") -> bool:
    """Whether the store counted it, as far as it said so. Where the connection broke nobody knows; it is taken as not
    counted, and told again: a quota that is a little too strict for a minute."""
    return not asked.cancelled() and asked.exception() is None and asked.result().refusal is None


def _refused(tenant: str, refusal: Refusal) -> RequestRefused:
    words = refusal.quota.replace("_", " ")
    return RequestRefused(
        CODE_RESOURCE_EXHAUSTED,
        QUOTA_EXCEEDED,
        f"tenant {tenant!r} has used up its quota of {words}",
        quota=f"{tenant}/{refusal.quota}",
        retry_delay_ms=refusal.retry_ms,
    )


def _too_large(tenant: str, tokens: int, quota: str, limit: int) -> RequestRefused:
    """No time to come back: it would be refused then too."""
    words = quota.replace("_", " ")
    return RequestRefused(
        CODE_RESOURCE_EXHAUSTED,
        QUOTA_EXCEEDED,
        f"the request may use {tokens} tokens, more than the quota of tenant {tenant!r} ever allows: {limit} {words}; "
        "lower max_tokens, or n",
        quota=f"{tenant}/{quota}",
    )

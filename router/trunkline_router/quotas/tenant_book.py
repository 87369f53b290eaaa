"""What one router knows of each tenant. Pure: time is passed in.

- TenantBook: what was admitted for it, enough to decide without the store and to enter it there again
- QuotaBook: those of all tenants
- OutputEstimates: how long its answers without max_tokens will be
"""

import math
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from trunkline_router.quotas.quota import Quotas, Refusal, Used, Window, judge
from trunkline_router.quotas.store import Answer, TenantReport, WindowChange

# Most other routers that count while the store does not answer. Their number comes from Redis, where others may write:
# a router still admits at least one part in 32 of what is left of a quota.
MOST_OTHERS = 31

MAX_ACCOUNTS = 4096  # in each router; listed tenants may have more
SHARED_ACCOUNT = "*"

# The first estimate for a tenant is such that its quota admits this many answers at once.
COLD_REQUESTS = 16
LEAST_COLD_TOKENS = 256
# Share of the tenant's token quota after which an estimate mostly reflects new answers.
MEMORY_SHARE = 0.25
LEAST_MEMORY_TOKENS = 1024
MAX_TENANTS = 4096  # those with the latest answers; forgotten tenants get the first estimate again, which is cautious


@dataclass(frozen=True, slots=True)
class When:
    """A bucket of time by this router's clock and, if the store counted the request itself, by the store's. The clocks
    differ, and a correction must lie in the bucket of what it corrects, so that both leave the window together."""

    bucket: int
    stores: int | None = None


class TenantBook:
    """One tenant's requests at this router."""

    def __init__(self, window_ms: int) -> None:
        self.window = Window(window_ms)
        self.quotas = Quotas()  # those of its last request
        self.in_flight = 0  # tokens that its running requests may use
        self.stored_in_flight = 0  # what the store has of that, once it has heard all that it was told
        self.asking = 0  # requests for which the store is being asked
        self.is_unsure = False  # whether the store has counted a request without this router's knowledge
        # (requests, tokens) by bucket, since the last report. Without those that have left the window.
        self._unreported: dict[When, tuple[int, int]] = {}
        # What other routers had admitted when the store last answered.
        self._others_requests = self._others_tokens = self._others_in_flight = 0.0
        self._others_as_of_ms = 0.0
        self._requests_since = self._tokens_since = 0  # admitted here since then

    def hear(self, answer: Answer, now_ms: float) -> None:
        """Takes the store's numbers for the whole fleet, after the request has been counted here."""
        self.window.expire(now_ms)
        self._others_requests = max(0.0, answer.used.requests - self.window.requests)
        self._others_tokens = max(0.0, answer.used.tokens - self.window.tokens)
        self._others_in_flight = max(0.0, answer.used.in_flight - self.in_flight)
        self._others_as_of_ms = now_ms
        self._requests_since = self._tokens_since = 0

    def judge_alone(self, quotas: Quotas, tokens: int, others: int, now_ms: float) -> Refusal | None:
        """Returns why a request is refused, judged without the store; None if it is admitted.

        Counts this router's requests; what others had used at the store's last answer, as it leaves the window; and for
        each other router that is known to be alive as much as this one has admitted since. So a short silence changes
        little; in a long one, when no other router is known to be alive, R routers admit at most R times the quota.
        At most MOST_OTHERS others count.
        """
        used, others = self.used(now_ms), min(others, MOST_OTHERS)
        used = Used(
            used.requests + others * self._requests_since,
            used.tokens + others * self._tokens_since,
            used.in_flight + others * self._tokens_since,
        )
        return judge(quotas, used, tokens, self.window, now_ms)

    def used(self, now_ms: float) -> Used:
        """Returns what the fleet has used, as far as this router knows."""
        self.window.expire(now_ms)
        left = max(0.0, 1 - (now_ms - self._others_as_of_ms) / self.window.window_ms)
        return Used(
            self.window.requests + left * self._others_requests,
            self.window.tokens + left * self._others_tokens,
            self.in_flight + left * self._others_in_flight,
        )

    def used_here(self, now_ms: float) -> Used:
        """Returns the part of that which is certain: what this router has admitted."""
        self.window.expire(now_ms)
        return Used(self.window.requests, self.window.tokens, self.in_flight)

    def admit(self, tokens: int, now_ms: float) -> None:
        """Counts an admitted request."""
        self.window.expire(now_ms)
        self.window.add(self.window.bucket(now_ms), 1, tokens)
        self.in_flight += tokens
        self._requests_since += 1
        self._tokens_since += tokens

    def correct(self, when: When, requests: int, tokens: int, now_ms: float) -> None:
        """Corrects what was admitted in a bucket, here and with the next report in the store."""
        self.window.expire(now_ms)
        if (requests or tokens) and self.window.holds(when.bucket, now_ms):
            self.window.add(when.bucket, requests, tokens)
            self.report(when, requests, tokens)

    def report(self, when: When, requests: int, tokens: int) -> None:
        """Adds to what the next report tells the store."""
        before = self._unreported.get(when, (0, 0))
        self._unreported[when] = before[0] + requests, before[1] + tokens

    def in_flight_change(self) -> int:
        """Returns what to add to the store's tokens in flight, and marks it as reported."""
        change, self.stored_in_flight = self.in_flight - self.stored_in_flight, self.in_flight
        return change

    def next_report(self, now_ms: float, *, everything: bool = False) -> TenantReport:
        """Returns what the store does not know yet, and marks it as reported. everything: it knows nothing, and counts
        no request that it is being asked for."""
        self._expire(now_ms)
        unreported, self._unreported = self._unreported, {}
        if everything:
            unreported = {When(bucket): (requests, tokens) for bucket, requests, tokens in self.window.contents()}
        changes = [
            WindowChange((when.bucket + 0.5) * self.window.width_ms, requests, tokens, when.stores)
            for when, (requests, tokens) in unreported.items()
        ]
        if self.asking and not everything:
            return TenantReport(changes, self.in_flight_change(), None)
        self.is_unsure = False
        return TenantReport(changes, self.in_flight_change(), self.in_flight)

    @property
    def has_changes(self) -> bool:
        return bool(self._unreported) or self.in_flight != self.stored_in_flight or self.is_unsure

    def is_empty(self, now_ms: float) -> bool:
        self._expire(now_ms)
        return not (self.window or self.in_flight or self.has_changes or self.asking)

    def _expire(self, now_ms: float) -> None:
        """Drops what has left the window, whether or not the store was told."""
        self.window.expire(now_ms)
        self._unreported = {
            when: counts
            for when, counts in self._unreported.items()
            if any(counts) and self.window.holds(when.bucket, now_ms)
        }


class QuotaBook:
    """All tenants with quotas, by account.

    Any client can invent tenant names, and each name costs keys in Redis and memory in every router. Tenants in the
    tenants file have their own accounts. So do unlisted tenants while there are fewer than `max_accounts`. Any further
    ones share one account, with the quotas of a single unlisted tenant, until nothing counts on another account.
    """

    def __init__(self, window_ms: int, max_accounts: int = MAX_ACCOUNTS) -> None:
        self._window_ms = window_ms
        self._max_accounts = max_accounts
        self._tenants: dict[str, TenantBook] = {}
        self._touched: set[str] = set()  # tenants with changes that the store may not know

    def account(self, tenant: str, *, is_listed: bool) -> str:
        """Returns the account on which the tenant's requests are counted now."""
        is_own = is_listed or tenant in self._tenants or len(self._tenants) < self._max_accounts
        return tenant if is_own else SHARED_ACCOUNT

    def tenant(self, name: str) -> TenantBook:
        """Returns a tenant's book, which the caller may change."""
        if name not in self._tenants:
            self._tenants[name] = TenantBook(self._window_ms)
        self._touched.add(name)
        return self._tenants[name]

    def names(self) -> Iterable[str]:
        """Returns the tenants of which anything counts."""
        return self._tenants.keys()

    def window(self, name: str) -> Window | None:
        """Returns what a tenant was admitted with here; None: nothing of it counts."""
        book = self._tenants.get(name)
        return None if book is None else book.window

    def used(self, name: str, now_ms: float) -> Used:
        """Returns what the fleet has used of a tenant's quotas, as far as this router knows."""
        book = self._tenants.get(name)
        return Used(0, 0, 0) if book is None else book.used(now_ms)

    @property
    def has_changes(self) -> bool:
        return any(self._tenants[name].has_changes for name in self._touched)

    def next_report(self, now_ms: float, *, is_beat: bool, everything: bool = False) -> dict[str, TenantReport]:
        """Returns what the store does not know yet, and marks it as reported. is_beat: with all tokens in flight, lest
        their entries in the store expire. everything: it knows nothing."""
        books = self._tenants if is_beat else {name: self._tenants[name] for name in self._touched}
        self._touched.clear()
        return {
            name: book.next_report(now_ms, everything=everything)
            for name, book in books.items()
            if everything or book.has_changes or (is_beat and book.in_flight)
        }

    def use(self, now_ms: float) -> list[tuple[str, Quotas, Used]]:
        """Returns each tenant with quotas, and what the fleet has used of them as far as this router knows."""
        return [(name, book.quotas, book.used(now_ms)) for name, book in self._tenants.items()]

    def forget_idle(self, now_ms: float) -> None:
        """Drops what has left the windows, and tenants without anything that counts, so that neither accumulates."""
        self._tenants = {name: book for name, book in self._tenants.items() if not book.is_empty(now_ms)}
        self._touched &= self._tenants.keys()


class OutputEstimates:
    """Estimates the length of an answer from the tenant's previous answers at this router.

    The estimate is the mean length of answers weighted by length: the expected length of the answer that a random
    token of the tenant belongs to. Its memory is measured in tokens, not in answers. So the long answers of a mixture
    dominate the estimate, and lowering it takes more than a quarter of the tenant's tokens per minute.

    `quota` is the smaller of a tenant's limits on tokens per minute and tokens in flight; None for no limit.
    """

    def __init__(self) -> None:
        self._tokens: OrderedDict[str, float] = OrderedDict()  # of one choice, by tenant

    def tokens(self, tenant: str, quota: int | None, most_tokens: int) -> int:
        """Estimated output tokens of one choice, at most `most_tokens`."""
        return min(math.ceil(self._tokens.get(tenant, _cold(quota))), most_tokens)

    def learn(self, tenant: str, quota: int | None, num_tokens: float, *, is_whole: bool) -> None:
        """Records that a choice had `num_tokens`. `is_whole` is False if it was cut off and would have been longer."""
        before = self._tokens.get(tenant, _cold(quota))
        if not is_whole and num_tokens <= before:
            return
        memory = max(LEAST_MEMORY_TOKENS, MEMORY_SHARE * quota if quota is not None else 0)
        self._tokens[tenant] = before + (1 - math.exp(-num_tokens / memory)) * (num_tokens - before)
        self._tokens.move_to_end(tenant)
        if len(self._tokens) > MAX_TENANTS:
            self._tokens.popitem(last=False)


def _cold(quota: int | None) -> float:
    return LEAST_COLD_TOKENS if quota is None else max(LEAST_COLD_TOKENS, quota / COLD_REQUESTS)

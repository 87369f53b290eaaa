"""Admits requests within their tenants' quotas. Asks the store, or this router's own book if the store does not answer;
when a request ends, tells both what it used.

A request without max_tokens is admitted with an estimate. If its answer outgrows the estimate, the tokens so far and as
many again count from then on: the request continues, but later requests see them. So a tenant exceeds its
quotas by what its admitted requests use beyond their estimates, and by nothing else.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from trunkline.status import CODE_RESOURCE_EXHAUSTED, QUOTA_EXCEEDED, RequestRefused
from trunkline_router.quotas.fleet import Neighbours
from trunkline_router.quotas.quota import QUOTA_NAMES, Quotas, RateLimit, Refusal, judge, rate_limits
from trunkline_router.quotas.reservation import Reservation
from trunkline_router.quotas.store import Answer
from trunkline_router.quotas.store_link import StoreLink
from trunkline_router.quotas.tenant_book import OutputEstimates, QuotaBook, TenantBook, When

RETRY_WHEN_DOWN_MS = 1000
UNKNOWN = "unknown"  # the quota of a request that is refused because no quota can be checked
LEAST_TOKENS = 1  # that a request counts for: its prompt is not empty


@dataclass(frozen=True, slots=True)
class LikelyUse:
    """What a request will probably count for, as far as that is known before its prompt is tokenized.

    max_tokens: of a choice; None: its tenant's estimate, at most `most_tokens`
    """

    prompt_tokens: int
    max_tokens: int | None
    most_tokens: int
    choices: int


@dataclass(slots=True, eq=False)
class Admitted:
    """An admitted request, until it is settled."""

    tenant: str
    output_tokens: int  # that it counts for, of all choices
    most_output_tokens: int  # the most that it can use
    choices: int
    quota: int | None  # of its tenant: the smaller of tokens in a minute and tokens in flight
    is_estimate: bool  # it has no max_tokens
    entries: int  # StoreLink.entries at its admission; if they differ later, the store no longer has its bucket
    parts: list[tuple[When, int]] = field(
        default_factory=list
    )  # tokens by when they were counted: at admission and later

    @property
    def tokens(self) -> int:
        """Tokens that it counts for."""
        return sum(tokens for _, tokens in self.parts)


class Admission:
    """Admits and settles requests.

    link: the store; None: there is none, and the book decides
    neighbours: the other routers
    """

    def __init__(
        self,
        link: StoreLink | None,
        book: QuotaBook,
        neighbours: Neighbours,
        *,
        admits_when_down: bool,
        now_ms: Callable[[], float],
    ) -> None:
        self._link = link
        self._book = book
        self._neighbours = neighbours
        self._admits_when_down = admits_when_down
        self._now_ms = now_ms
        self._estimates = OutputEstimates()
        self.reserves = self.reserves_alone = 0
        self.refused: Counter[str] = Counter()  # requests, by the quota that was used up, or UNKNOWN

    async def admit(
        self,
        tenant: str,
        quotas: Quotas,
        *,
        prompt_tokens: int,
        max_tokens: int | None,
        most_tokens: int,
        choices: int,
    ) -> Admitted:
        """Counts a request. Raises RequestRefused (QUOTA_EXCEEDED)."""
        book = self._book.tenant(tenant)
        book.quotas = quotas
        bound = quotas.largest_request()
        quota = None if bound is None else bound[1]
        tokens = self._tokens(tenant, quota, LikelyUse(prompt_tokens, max_tokens, most_tokens, choices))
        if bound is not None and tokens > bound[1]:
            if max_tokens is not None or prompt_tokens > bound[1]:
                self.refused[bound[0]] += 1
                raise _too_large(tenant, tokens, *bound)
            tokens = bound[1]  # an estimate is no reason to refuse
        when = await self._count(tenant, quotas, book, tokens)
        return Admitted(
            tenant,
            output_tokens=tokens - prompt_tokens,
            most_output_tokens=choices * most_tokens,
            choices=choices,
            quota=quota,
            is_estimate=max_tokens is None,
            entries=self._entries,
            parts=[(when, tokens)],
        )

    def check_left(self, tenant: str, quotas: Quotas, likely: Callable[[], LikelyUse]) -> None:
        """Raises RequestRefused (QUOTA_EXCEEDED) if what this router has admitted fills a quota: then admit() would
        refuse the smallest request too, whatever other routers have admitted.

        likely: returns the use for which the client is told when to retry; a smaller one would have it come too early
        """
        now_ms, book = self._now_ms(), self._book.tenant(tenant)
        book.quotas = quotas
        used = book.used_here(now_ms)
        refusal = judge(quotas, used, LEAST_TOKENS, book.window, now_ms)
        if refusal is None:
            return
        self.refused[refusal.quota] += 1
        tokens = self._retried_tokens(tenant, quotas, likely())
        raise _refused(tenant, judge(quotas, used, tokens, book.window, now_ms) or refusal)

    def _retried_tokens(self, tenant: str, quotas: Quotas, likely: LikelyUse) -> int:
        """Returns the tokens with which admit() will probably count a request when it comes again."""
        bound = quotas.largest_request()
        tokens = self._tokens(tenant, None if bound is None else bound[1], likely)
        if bound is not None and tokens > bound[1]:
            # One that is too large for its quota should not wait long to be told so.
            return LEAST_TOKENS if likely.max_tokens is not None else bound[1]
        return max(LEAST_TOKENS, tokens)

    def _tokens(self, tenant: str, quota: int | None, use: LikelyUse) -> int:
        """Returns what a request counts for: its prompt, and max_tokens or the estimate for each choice."""
        of_choice = use.max_tokens
        if of_choice is None:
            of_choice = self._estimates.tokens(tenant, quota, use.most_tokens)
        return use.prompt_tokens + use.choices * of_choice

    def rate_limits(self, tenant: str, quotas: Quotas) -> list[RateLimit]:
        """Returns what is left of the tenant's limits per minute, as far as this router knows."""
        now_ms = self._now_ms()
        return rate_limits(quotas, self._book.used(tenant, now_ms), self._book.window(tenant), now_ms)

    def watch(self, admitted: Admitted, reservation: Reservation) -> None:
        """The request runs now, and its reservation counts its output. If that outgrows the estimate, what the request
        has used beyond it counts, and as much again: an answer of this length is expected to double."""
        if admitted.is_estimate:
            reservation.meter.when_past(admitted.output_tokens, lambda: self._top_up(admitted, reservation))

    def _top_up(self, admitted: Admitted, reservation: Reservation) -> None:
        now_ms, output = self._now_ms(), reservation.output_tokens
        more = max(output, min(2 * output, admitted.most_output_tokens)) - admitted.output_tokens
        book = self._book.tenant(admitted.tenant)
        when = When(book.window.bucket(now_ms))
        admitted.output_tokens += more
        admitted.parts.append((when, more))
        book.in_flight += more
        book.correct(when, 0, more, now_ms)
        self.watch(admitted, reservation)

    def keep(self, admitted: Admitted) -> None:
        """The request has ended, and stays counted with all its tokens."""
        self._book.tenant(admitted.tenant).in_flight -= admitted.tokens

    def settle(self, admitted: Admitted, used: int, output_tokens: int, *, is_whole: bool) -> None:
        """The request has ended and used `used` tokens, of these `output_tokens` output. `is_whole`: it was not broken
        off."""
        book, now_ms = self._book.tenant(admitted.tenant), self._now_ms()
        unused, over = max(0, admitted.tokens - used), max(0, used - admitted.tokens)
        book.in_flight -= admitted.tokens
        if not used:  # no worker served it: the tenant is not charged
            book.correct(self._where(admitted, admitted.parts[0][0]), -1, 0, now_ms)
        elif admitted.is_estimate:
            per_choice = output_tokens / admitted.choices
            self._estimates.learn(admitted.tenant, admitted.quota, per_choice, is_whole=is_whole)
        for when, tokens in reversed(admitted.parts):  # takes back the latest additions first
            back = min(unused, tokens)
            unused -= back
            book.correct(self._where(admitted, when), 0, -back, now_ms)
        book.correct(When(book.window.bucket(now_ms)), 0, over, now_ms)

    @property
    def _entries(self) -> int:
        return 0 if self._link is None else self._link.entries

    def _where(self, admitted: Admitted, when: When) -> When:
        return when if admitted.entries == self._entries else When(when.bucket)

    async def _count(self, tenant: str, quotas: Quotas, book: TenantBook, tokens: int) -> When:
        """Counts a request and returns the bucket that it counts in. Raises RequestRefused."""
        self.reserves += 1
        asked, link = None, self._link
        if link is not None and link.is_reachable:
            asked = link.ask(tenant, quotas, tokens, book.in_flight, book.ask())
        book.in_flight += tokens
        answer = None
        if link is not None and asked is not None:
            book.reported_in_flight = None
            try:
                answer = await link.answer(asked)
            except asyncio.CancelledError:
                self._book.tenant(tenant).in_flight -= tokens
                bucket = book.window.bucket(self._now_ms())
                asked.add_done_callback(partial(self._take_back, tenant, bucket, tokens))
                raise
        now_ms = self._now_ms()
        bucket = book.window.bucket(now_ms)
        if answer is not None:
            refused = None if answer.refusal is None else _refused(tenant, answer.refusal)
            book.answered(0 if refused is None else tokens)
        else:
            refused = self._judge_alone(tenant, quotas, book, tokens, now_ms)
            if asked is not None:  # whether the store counted it is known later; then book and store must agree
                late_answer = partial(self._reconcile, tenant, bucket, tokens, refused is None, self._entries)
                asked.add_done_callback(late_answer)
            elif refused is None:
                self._book.tenant(tenant).report(When(bucket), 1, tokens)
        if refused is None:
            book.admit(tokens, now_ms)
        if answer is not None:
            book.hear(answer, now_ms)
        if refused is not None:
            self._book.tenant(tenant).in_flight -= tokens
            quota = (refused.quota or "").rpartition("/")[2]
            self.refused[quota if quota in QUOTA_NAMES else UNKNOWN] += 1
            raise refused
        return When(bucket, None if answer is None else answer.bucket)

    def _judge_alone(
        self, tenant: str, quotas: Quotas, book: TenantBook, tokens: int, now_ms: float
    ) -> RequestRefused | None:
        if self._link is not None:
            self.reserves_alone += 1
        if self._link is None or self._admits_when_down:
            refusal = book.judge_alone(quotas, tokens, len(self._neighbours), now_ms)
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
        """Reconciles the store's late answer on a request with the decision that was made here meanwhile."""
        was_counted = _was_counted(asked)
        self._book.tenant(tenant).answered(_refused_tokens(asked, tokens))
        if not asked.cancelled() and asked.exception() is None:
            self._book.tenant(tenant).hear(asked.result(), self._now_ms())
        if was_admitted and not was_counted and entries == self._entries:
            self._book.tenant(tenant).report(When(bucket), 1, tokens)
        elif was_counted and not was_admitted:
            self._book.tenant(tenant).report(When(bucket, asked.result().bucket), -1, -tokens)

    def _take_back(self, tenant: str, bucket: int, tokens: int, asked: "asyncio.Future[Answer]") -> None:
        """The request was cancelled while the store was asked."""
        self._book.tenant(tenant).answered(_refused_tokens(asked, tokens))
        if _was_counted(asked):
            self._book.tenant(tenant).report(When(bucket, asked.result().bucket), -1, -tokens)


def _was_counted(asked: "asyncio.Future[Answer]") -> bool:
    """Whether the store confirmed that it counted the request. If the connection broke, the request is reported again:
    a quota may be slightly too strict for a minute."""
    return not asked.cancelled() and asked.exception() is None and asked.result().refusal is None


def _refused_tokens(asked: "asyncio.Future[Answer]", tokens: int) -> int:
    said_no = not asked.cancelled() and asked.exception() is None and asked.result().refusal is not None
    return tokens if said_no else 0


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
    """Returns a refusal without a retry delay: the request would be refused again."""
    words = quota.replace("_", " ")
    return RequestRefused(
        CODE_RESOURCE_EXHAUSTED,
        QUOTA_EXCEEDED,
        f"the request may use {tokens} tokens, more than the quota of tenant {tenant!r} ever allows: {limit} {words}; "
        "lower max_tokens, or n",
        quota=f"{tenant}/{quota}",
    )

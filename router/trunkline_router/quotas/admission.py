"""Admits requests within their tenants' quotas. Asks the store, or this router's own book if the store does not answer;
when a request ends, tells both what it used.

A request without max_tokens is admitted with an estimate. If its answer outgrows the estimate, the tokens so far and as
many again count from the next beat on: the request continues, but later requests see them. So a tenant exceeds its
quotas by what its admitted requests use beyond their estimates within a second, and by nothing else.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from trunkline.status import CODE_RESOURCE_EXHAUSTED, QUOTA_EXCEEDED, RequestRefused
from trunkline_router.quotas.fleet import Neighbours
from trunkline_router.quotas.quota import QUOTA_NAMES, Quotas, Refusal, judge
from trunkline_router.quotas.reservation import Admitted, Reservation
from trunkline_router.quotas.store import Answer
from trunkline_router.quotas.store_link import StoreLink
from trunkline_router.quotas.tenant_book import OutputEstimates, QuotaBook, TenantBook, When

RETRY_WHEN_DOWN_MS = 1000
UNKNOWN = "unknown"  # the quota of a request that is refused because no quota can be checked
LEAST_TOKENS = 1  # that a request counts for: its prompt is not empty


@dataclass(frozen=True, slots=True)
class RequestUse:
    """What a request may use, as far as it is known.

    max_tokens: of a choice; None: its tenant's estimate, at most `most_tokens`
    """

    prompt_tokens: int
    max_tokens: int | None
    most_tokens: int
    choices: int


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

    async def admit(self, account: str, quotas: Quotas, use: RequestUse) -> Admitted:
        """Counts a request. Raises RequestRefused (QUOTA_EXCEEDED)."""
        book, bound = self._book.tenant(account), quotas.largest_request()
        book.quotas = quotas
        tokens = self._tokens(account, bound, use)
        if bound is not None and tokens > bound[1]:
            self.refused[bound[0]] += 1
            raise _too_large(account, tokens, *bound)
        when = await self._count(account, quotas.that_count(tokens), book, tokens)
        return Admitted(
            account,
            output_tokens=tokens - use.prompt_tokens,
            most_output_tokens=use.choices * use.most_tokens,
            choices=use.choices,
            quota=None if bound is None else bound[1],
            is_estimate=use.max_tokens is None,
            entries=self._entries,
            parts=[(when, tokens)],
        )

    def check_left(self, account: str, quotas: Quotas, *, tokens: int = LEAST_TOKENS) -> None:
        """Raises RequestRefused (QUOTA_EXCEEDED) if what this router has admitted fills a quota: then admit() would
        refuse a request of so many tokens too, whatever other routers have admitted. The retry delay is that of the
        smallest request: a larger one that comes again may be refused once more, by admit(), with its own."""
        now_ms, book = self._now_ms(), self._book.tenant(account)
        book.quotas = quotas
        refusal = judge(quotas.that_count(tokens), book.used_here(now_ms), tokens, book.window, now_ms)
        if refusal is not None:
            self.refused[refusal.quota] += 1
            raise _refused(account, refusal)

    def _tokens(self, account: str, bound: tuple[str, int] | None, use: RequestUse) -> int:
        """Returns what a request counts for: its prompt, and max_tokens or the estimate for each choice."""
        if use.max_tokens is not None:
            return use.prompt_tokens + use.choices * use.max_tokens
        quota = None if bound is None else bound[1]
        tokens = use.prompt_tokens + use.choices * self._estimates.tokens(account, quota, use.most_tokens)
        if quota is not None and use.prompt_tokens <= quota:
            return min(tokens, quota)  # an estimate is no reason to refuse
        return tokens

    def settle(self, reservation: Reservation, admitted: Admitted) -> None:
        """The request has ended."""
        book, now_ms = self._book.tenant(admitted.account), self._now_ms()
        book.in_flight -= admitted.tokens
        if reservation.is_charged_in_full:
            return
        used = reservation.used_tokens
        unused, over = max(0, admitted.tokens - used), max(0, used - admitted.tokens)
        if not used:  # no worker served it: the tenant is not charged
            book.correct(self._where(admitted, admitted.parts[0][0]), -1, 0, now_ms)
        elif admitted.is_estimate:
            per_choice = reservation.meter.tokens / admitted.choices
            self._estimates.learn(admitted.account, admitted.quota, per_choice, is_whole=reservation.has_ended)
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

    async def _count(self, account: str, quotas: Quotas, book: TenantBook, tokens: int) -> When:
        """Counts a request and returns the bucket that it counts in. Raises RequestRefused."""
        self.reserves += 1
        answer = None
        if self._link is not None and self._link.is_reachable:
            book.asking += 1
            asked = self._link.ask(account, quotas, tokens, book.in_flight_change())
            try:
                answer = await self._link.answer(asked)
            finally:
                if answer is None:
                    asked.add_done_callback(partial(self._hear_late, account, tokens, self._now_ms()))
                else:
                    book.asking -= 1
        now_ms = self._now_ms()
        when = When(book.window.bucket(now_ms), None if answer is None else answer.bucket)
        if answer is None:
            refused = self._judge_alone(account, quotas, book, tokens, now_ms)
        else:
            refused = None if answer.refusal is None else _refused(account, answer.refusal)
        if refused is None:
            book.admit(tokens, now_ms)
            if answer is None:
                self._book.tenant(account).report(when, 1, tokens)
            else:
                book.stored_in_flight += tokens
        if answer is not None:
            book.hear(answer, now_ms)
        if refused is not None:
            quota = (refused.quota or "").rpartition("/")[2]
            self.refused[quota if quota in QUOTA_NAMES else UNKNOWN] += 1
            raise refused
        return when

    def _judge_alone(
        self, account: str, quotas: Quotas, book: TenantBook, tokens: int, now_ms: float
    ) -> RequestRefused | None:
        if self._link is not None:
            self.reserves_alone += 1
        if self._link is None or self._admits_when_down:
            refusal = book.judge_alone(quotas, tokens, len(self._neighbours), now_ms)
            return None if refusal is None else _refused(account, refusal)
        return RequestRefused(
            CODE_RESOURCE_EXHAUSTED,
            QUOTA_EXCEEDED,
            f"the quotas of tenant {account!r} cannot be checked now",
            quota=account,
            retry_delay_ms=RETRY_WHEN_DOWN_MS,
        )

    def _hear_late(self, account: str, tokens: int, asked_ms: float, asked: "asyncio.Future[Answer | None]") -> None:
        """The request did not wait for this answer. What the store has counted for it is taken back: it was decided
        here meanwhile, or its client has gone. If the connection broke, that is not known, and a quota may be slightly
        too strict for a minute."""
        book = self._book.tenant(account)
        book.asking -= 1
        answer = None if asked.cancelled() or asked.exception() is not None else asked.result()
        if answer is None:
            book.is_unsure = True
            return
        if answer.refusal is None:
            book.stored_in_flight += tokens
            book.report(When(book.window.bucket(asked_ms), answer.bucket), -1, -tokens)
        book.hear(answer, self._now_ms())


def top_up(book: QuotaBook, admitted: Admitted, output_tokens: int, now_ms: float) -> None:
    """Counts a running request that outgrows its estimate with its output so far and as much again: an answer of this
    length is expected to double."""
    if not admitted.is_estimate or output_tokens <= admitted.output_tokens:
        return
    more = max(output_tokens, min(2 * output_tokens, admitted.most_output_tokens)) - admitted.output_tokens
    tenant = book.tenant(admitted.account)
    when = When(tenant.window.bucket(now_ms))
    admitted.output_tokens += more
    admitted.parts.append((when, more))
    tenant.in_flight += more
    tenant.correct(when, 0, more, now_ms)


def _refused(account: str, refusal: Refusal) -> RequestRefused:
    words = refusal.quota.replace("_", " ")
    return RequestRefused(
        CODE_RESOURCE_EXHAUSTED,
        QUOTA_EXCEEDED,
        f"tenant {account!r} has used up its quota of {words}",
        quota=f"{account}/{refusal.quota}",
        retry_delay_ms=refusal.retry_ms,
    )


def _too_large(account: str, tokens: int, quota: str, limit: int) -> RequestRefused:
    """Returns a refusal without a retry delay: the request would be refused again."""
    words = quota.replace("_", " ")
    return RequestRefused(
        CODE_RESOURCE_EXHAUSTED,
        QUOTA_EXCEEDED,
        f"the request may use {tokens} tokens, more than the quota of tenant {account!r} ever allows: {limit} {words}; "
        "lower max_tokens, or n",
        quota=f"{account}/{quota}",
    )

"""The latest requests that have ended, in bounded memory, shared fairly among tenants."""

from collections import defaultdict, deque
from collections.abc import Collection, Iterator
from functools import partial

from trunkline_router.observe.recent.told_request import ToldRequest
from trunkline_router.record.request_record import CANCELLED, RequestRecord
from trunkline_router.record.token_bucket import TokenBucket

BURST, PER_S = 128, 32.0  # requests of a tenant that offer() keeps: at once, and each second


class RecordRing:
    """At most `most` requests. Those with the latest plans keep them, as far as the plans have at most `most_rows`
    workers in all.

    When it is full, the oldest request goes. But a tenant that has as many requests as the one whose request is the
    oldest loses its own oldest one: so a busy tenant does not displace the others.
    """

    def __init__(self, most: int, most_rows: int) -> None:
        self._most = most
        self._most_rows = most_rows
        self._ended: dict[int, ToldRequest] = {}  # oldest first
        self._of_tenant: dict[str, deque[int]] = {}  # numbers in `_ended`, oldest first
        self._with_plans: deque[ToldRequest] = deque(maxlen=most)
        # Of the tenants that have requests here.
        self._allowances = defaultdict[str, TokenBucket](partial(TokenBucket, PER_S, BURST))
        self._num_added = 0
        self.num_rows = 0

    def offer(self, record: RequestRecord) -> None:
        """Adds a request, unless its tenant has used up its allowance. A cancelled request is added in any case.

        Without an allowance, a tenant that ends a thousand requests a second would replace all of them twice a second,
        before anyone can look at them. Keeping a request also costs more than freeing it at once.
        """
        ended_s = record.started_s if record.ended_s is None else record.ended_s
        # Ends may come out of order: an aborted request is told of late.
        if self._allowances[record.tenant].takes(1.0, ended_s) or record.outcome == CANCELLED:
            self.add(record)

    def add(self, record: RequestRecord) -> None:
        """Adds a request whose plans are still there."""
        told = ToldRequest(record)
        self._num_added += 1
        self._ended[self._num_added] = told
        self._of_tenant.setdefault(record.tenant, deque()).append(self._num_added)
        if len(self._ended) > self._most:
            self._drop_one(record.tenant)
        if len(self._with_plans) == self._most:
            self._forget_oldest_plans()
        self._with_plans.append(told)
        self.num_rows += told.num_rows
        while self.num_rows > self._most_rows:
            self._forget_oldest_plans()

    def _forget_oldest_plans(self) -> None:
        oldest = self._with_plans.popleft()
        self.num_rows -= oldest.num_rows
        oldest.forget_plans()

    def _drop_one(self, newcomer: str) -> None:
        loser = self._ended[next(iter(self._ended))].record.tenant
        if len(self._of_tenant[newcomer]) > len(self._of_tenant[loser]):
            loser = newcomer
        numbers = self._of_tenant[loser]
        del self._ended[numbers.popleft()]
        if not numbers:
            del self._of_tenant[loser]
            self._allowances.pop(loser, None)

    def __len__(self) -> int:
        return len(self._ended)

    @property
    def tenants(self) -> Collection[str]:
        """The tenants that have requests here."""
        return self._of_tenant

    def newest_first(self) -> Iterator[ToldRequest]:
        return reversed(self._ended.values())

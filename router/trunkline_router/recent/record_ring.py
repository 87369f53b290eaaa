"""The latest requests that have ended, in bounded memory, shared fairly among tenants."""

from collections import deque
from collections.abc import Iterator

from trunkline_router.recent.told_request import ToldRequest
from trunkline_router.telemetry.request_record import RequestRecord

FEW = 128  # requests of a tenant that may end in quick succession and are all kept
SPACING_S = 1 / 32  # between the ends of a tenant's further requests


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
        self._num_added = 0
        self.num_rows = 0

    def has_place(self, record: RequestRecord) -> bool:
        """Whether few requests of the tenant are kept, or none that ended just before this one. A tenant that ends a
        thousand requests a second would displace all of them each half second, and what is kept for so short costs
        more than what is freed at once."""
        numbers = self._of_tenant.get(record.tenant)
        if numbers is None or len(numbers) < FEW:
            return True
        return (record.ended_s or record.started_s) - self._ended[numbers[-1]].end_s >= SPACING_S

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

    def __len__(self) -> int:
        return len(self._ended)

    def newest_first(self) -> Iterator[ToldRequest]:
        return reversed(self._ended.values())

"""The latest records of requests, in bounded memory, shared fairly among tenants."""

from collections import deque
from collections.abc import Iterator

from trunkline_router.telemetry.request_record import RequestRecord


class RecordRing:
    """At most `most` records, whose placements have at most `most_rows` workers in all.

    When it is full, the oldest record goes. But a tenant that has at least as many records as the one whose record is
    the oldest loses its own oldest one: so a busy tenant does not displace the others.
    """

    def __init__(self, most: int, most_rows: int) -> None:
        self._most = most
        self._most_rows = most_rows
        self._records: dict[int, RequestRecord] = {}  # oldest first
        self._of_tenant: dict[str, deque[int]] = {}  # numbers in `_records`, oldest first
        self._num_added = 0
        self.num_rows = 0

    def add(self, record: RequestRecord) -> None:
        self._num_added += 1
        self._records[self._num_added] = record
        self._of_tenant.setdefault(record.tenant, deque()).append(self._num_added)
        self.num_rows += rows_of(record)
        while len(self._records) > self._most or (self.num_rows > self._most_rows and len(self._records) > 1):
            self._drop_one(record.tenant)

    def _drop_one(self, newcomer: str) -> None:
        oldest = self._records[next(iter(self._records))].tenant
        if len(self._of_tenant[newcomer]) > max(1, len(self._of_tenant[oldest]) - 1):
            oldest = newcomer
        numbers = self._of_tenant[oldest]
        self.num_rows -= rows_of(self._records.pop(numbers.popleft()))
        if not numbers:
            del self._of_tenant[oldest]

    def __len__(self) -> int:
        return len(self._records)

    def newest_first(self) -> Iterator[RequestRecord]:
        return reversed(self._records.values())


def rows_of(record: RequestRecord) -> int:
    """Returns what a record's size depends on: a placement has a row for each worker of the model."""
    return sum(len(placement.plan.workers.worker_ids) for placement in record.placements)

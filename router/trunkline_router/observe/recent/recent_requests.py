"""The requests that ended lately in this process, in bounded memory that tenants share fairly."""

from collections import defaultdict, deque
from collections.abc import Collection, Iterator, Mapping
from functools import cached_property
from itertools import chain
from operator import attrgetter
from statistics import median

from trunkline.status import QUOTA_EXCEEDED
from trunkline.v1.fleet_pb2 import PredictedTtft
from trunkline_router.record.rate_limits import BudgetLimits, FairBudget
from trunkline_router.record.request_record import CANCELLED, COMPLETE, RequestRecord
from trunkline_router.record.ttft_parts import Part, cause_of, ttft_parts

MOST_RECENT, MOST_NOTABLE = 512, 256
# Requests that are kept though they are not notable. Without a limit, a thousand that end each second would replace all
# of them twice a second, before anyone can look at them. Keeping a request also costs more than freeing it at once.
KEPT = BudgetLimits(per_s=64.0, at_once=256.0, reserve=128.0, account_per_s=8.0, account_at_once=16.0)
SLOW_S = 0.5  # a later first token makes a request notable
MOST_TTFTS = 64  # of a worker


class ShownRequest:
    """A request as watchers see it. Its parts are worked out by the first look: most requests are never looked at.

    now_s: for a request that still runs; None: it has ended
    """

    def __init__(self, record: RequestRecord, now_s: float | None = None) -> None:
        self.record = record
        self.is_running = now_s is not None
        self.end_s = now_s or record.ended_s or record.started_s  # when it ended, or now

    def parts(self) -> list[Part]:
        """Returns where the time to first token went."""
        return ttft_parts(self.record, self.end_s)

    @cached_property
    def cause(self) -> str:
        """The kind of part that took the most of it, "" if none took long."""
        return cause_of(self.record, self.end_s)


class RecordRing:
    """At most `most` requests. When it is full, the oldest one goes. But a tenant that has as many requests as the one
    whose request is the oldest loses its own oldest one: so a busy tenant does not displace the others.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._ended: dict[ShownRequest, None] = {}  # oldest first
        self._of_tenant: dict[str, deque[ShownRequest]] = {}  # oldest first

    def add(self, record: RequestRecord) -> None:
        kept = ShownRequest(record)
        self._ended[kept] = None
        self._of_tenant.setdefault(record.tenant, deque()).append(kept)
        if len(self._ended) > self._most:
            self._drop_one(record.tenant)

    def _drop_one(self, newcomer: str) -> None:
        loser = next(iter(self._ended)).record.tenant
        if len(self._of_tenant[newcomer]) > len(self._of_tenant[loser]):
            loser = newcomer
        requests = self._of_tenant[loser]
        del self._ended[requests.popleft()]
        if not requests:
            del self._of_tenant[loser]

    def __len__(self) -> int:
        return len(self._ended)

    @property
    def tenants(self) -> Collection[str]:
        """The tenants that have requests here."""
        return self._of_tenant

    def newest_first(self) -> Iterator[ShownRequest]:
        return reversed(self._ended)


class RecentRequests:
    """Failed, resumed and slow requests are kept for longer than the others, of which a part is kept
    while many end."""

    def __init__(self, *, slow_s: float = SLOW_S) -> None:
        self._slow_s = slow_s
        self._recent = RecordRing(MOST_RECENT)
        self._notable = RecordRing(MOST_NOTABLE)
        self._budget = FairBudget(KEPT, 0.0)

    def request_ended(self, record: RequestRecord) -> None:
        """Takes a request that has ended."""
        ended_s = record.started_s if record.ended_s is None else record.ended_s
        # Ends may come out of order: an aborted request is reported late.
        has_room = self._budget.takes(record.tenant, ended_s)
        if has_room:
            for placement in record.placements:
                placement.keep_candidates()
        if self._is_notable(record):
            self._notable.add(record)
        elif has_room or record.outcome == CANCELLED:
            self._recent.add(record)

    def newest_first(self, *, only_notable: bool = False) -> Iterator[ShownRequest]:
        """Yields the requests, by their ends."""
        if only_notable:
            return self._notable.newest_first()
        return iter(sorted(self._all(), key=attrgetter("end_s"), reverse=True))

    def refused_by_quota(self) -> Mapping[str, int]:
        """Returns how many of the requests were refused because a quota was used up, by tenant. Each tenant that has
        any request here is in it."""
        counts = dict.fromkeys(chain(self._recent.tenants, self._notable.tenants), 0)
        for request in self._notable.newest_first():
            if request.record.outcome == QUOTA_EXCEEDED:
                counts[request.record.tenant] += 1
        return counts

    def predicted(self) -> Mapping[str, PredictedTtft]:
        """Returns how well the TTFTs of the latest requests were predicted, by worker."""
        by_worker: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for record in (request.record for request in self._all()):
            pair = _predicted_and_real_s(record)
            if pair is not None and len(by_worker[record.worker]) < MOST_TTFTS:
                by_worker[record.worker].append(pair)
        return {
            worker: PredictedTtft(
                requests=len(pairs),
                predicted_p50_s=median(predicted for predicted, _ in pairs),
                real_p50_s=median(real for _, real in pairs),
            )
            for worker, pairs in by_worker.items()
        }

    def _all(self) -> Iterator[ShownRequest]:
        return chain(self._recent.newest_first(), self._notable.newest_first())

    def _is_notable(self, record: RequestRecord) -> bool:
        return record.is_failed or len(record.attempts) > 1 or (record.ttft_s or 0.0) > self._slow_s


def _predicted_and_real_s(record: RequestRecord) -> tuple[float, float] | None:
    """Of a request that one worker answered: the time to the output that the decision predicted. None for others."""
    if len(record.attempts) != 1 or len(record.placements) != 1:
        return None
    predicted_s, attempt = record.placements[0].predicted_ttft_s, record.attempts[0]
    answered_s = record.answered_s(attempt)
    if attempt.ended != COMPLETE or predicted_s is None or answered_s is None:
        return None
    return predicted_s, answered_s - attempt.started_s

"""The requests that ended lately in this process, in bounded memory that tenants share fairly."""

from collections import defaultdict, deque
from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from operator import attrgetter
from statistics import median

from trunkline.status import QUOTA_EXCEEDED
from trunkline.v1.fleet_pb2 import PredictedTtft
from trunkline_router.record.request_record import CANCELLED, COMPLETE, MOST_CANDIDATES, RequestRecord
from trunkline_router.record.token_bucket import TokenBucket
from trunkline_router.record.ttft_parts import Part, cause_of, ttft_parts
from trunkline_router.routing.policy import Candidate, RoutePlan

MOST_RECENT, MOST_NOTABLE = 512, 256
MOST_ROWS = 1 << 15  # of routing plans, in each of the two rings: some 10 MiB
BURST, PER_S = 128, 32.0  # requests of a tenant that RecordRing.offer() keeps: at once, and each second
SLOW_S = 0.5  # a later first token makes a request notable
MOST_TTFTS = 64  # of a worker
MOST_WORKERS = 1024  # whose TTFTs are kept

_END_S = attrgetter("end_s")


class ShownRequest:
    """A request as watchers see it: its record, and what the router weighed for it.

    Keeps the plans of the record, which drops them once its listeners have run. Candidates and parts are worked out by
    the first look: most requests are never looked at.

    now_s: for a request that still runs; None: it has ended
    """

    __slots__ = ("_candidates", "_cause", "_now_s", "_plans", "num_rows", "record")

    def __init__(self, record: RequestRecord, now_s: float | None = None) -> None:
        self.record = record
        self._now_s = now_s
        self.num_rows = sum(placement.num_workers for placement in record.placements)  # what the plans' size depends on
        self._plans: Sequence[RoutePlan | None] = [placement.plan for placement in record.placements]
        self._candidates: dict[int, Sequence[Candidate]] = {}  # by place among the placements
        self._cause: str | None = None

    def forget_plans(self) -> None:
        """Keeps the decisions, but not what they were made from."""
        self._plans, self.num_rows = (), 0

    def candidates(self, place: int) -> Sequence[Candidate]:
        """Returns the chosen worker of a placement, then the next best; none if they are forgotten."""
        if place not in self._candidates:
            plan = self._plans[place] if place < len(self._plans) else None
            self._candidates[place] = () if plan is None else plan.best(MOST_CANDIDATES)
        return self._candidates[place]

    @property
    def is_running(self) -> bool:
        return self._now_s is not None

    @property
    def end_s(self) -> float:
        """When it ended, or now."""
        return self._now_s or self.record.ended_s or self.record.started_s

    def parts(self) -> list[Part]:
        """Returns where the time to first token went."""
        return ttft_parts(self.record, self.end_s)

    @property
    def cause(self) -> str:
        """The kind of part that took the most of it, "" if none took long."""
        if self._cause is None:
            self._cause = cause_of(self.record, self.end_s)
        return self._cause


class RecordRing:
    """At most `most` requests. Those with the latest plans keep them, as far as the plans have at most `most_rows`
    workers in all.

    When it is full, the oldest request goes. But a tenant that has as many requests as the one whose request is the
    oldest loses its own oldest one: so a busy tenant does not displace the others.
    """

    def __init__(self, most: int, most_rows: int) -> None:
        self._most = most
        self._most_rows = most_rows
        self._ended: dict[int, ShownRequest] = {}  # oldest first
        self._of_tenant: dict[str, deque[int]] = {}  # numbers in `_ended`, oldest first
        self._with_plans: deque[ShownRequest] = deque(maxlen=most)
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
        # Ends may come out of order: an aborted request is reported late.
        if self._allowances[record.tenant].takes(1.0, ended_s) or record.outcome == CANCELLED:
            self.add(record)

    def add(self, record: RequestRecord) -> None:
        """Adds a request whose plans are still there."""
        kept = ShownRequest(record)
        self._num_added += 1
        self._ended[self._num_added] = kept
        self._of_tenant.setdefault(record.tenant, deque()).append(self._num_added)
        if len(self._ended) > self._most:
            self._drop_one(record.tenant)
        if len(self._with_plans) == self._most:
            self._forget_oldest_plans()
        self._with_plans.append(kept)
        self.num_rows += kept.num_rows
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

    def newest_first(self) -> Iterator[ShownRequest]:
        return reversed(self._ended.values())


class RecentRequests:
    """A RequestListener. Failed, resumed and slow requests are kept for longer than the others, of which a part is kept
    while many end."""

    def __init__(self, *, slow_s: float = SLOW_S) -> None:
        self._slow_s = slow_s
        self._recent = RecordRing(MOST_RECENT, MOST_ROWS)
        self._notable = RecordRing(MOST_NOTABLE, MOST_ROWS)
        self._ttfts_s: dict[str, deque[tuple[float, float]]] = {}  # by worker: predicted and real

    def request_ended(self, record: RequestRecord) -> None:
        """See RequestListener."""
        if self._is_notable(record):
            self._notable.add(record)
        else:
            self._recent.offer(record)
        self._note_ttft(record)

    def newest_first(self, *, only_notable: bool = False) -> Iterator[ShownRequest]:
        """Yields the requests, by their ends."""
        if only_notable:
            yield from self._notable.newest_first()
            return
        both = chain(self._recent.newest_first(), self._notable.newest_first())
        yield from sorted(both, key=_END_S, reverse=True)

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
        return {
            worker: PredictedTtft(
                requests=len(pairs),
                predicted_p50_s=median(predicted for predicted, _ in pairs),
                real_p50_s=median(real for _, real in pairs),
            )
            for worker, pairs in self._ttfts_s.items()
        }

    def forget_workers(self, known: Container[str]) -> None:
        """Forgets the TTFTs of workers that are not known any more."""
        self._ttfts_s = {worker: pairs for worker, pairs in self._ttfts_s.items() if worker in known}

    def _is_notable(self, record: RequestRecord) -> bool:
        return record.is_failed or len(record.attempts) > 1 or (record.ttft_s or 0.0) > self._slow_s

    def _note_ttft(self, record: RequestRecord) -> None:
        """Only requests that one worker answered: their TTFT is what the decision predicted."""
        if len(record.attempts) != 1 or len(record.placements) != 1:
            return
        (attempt,), (placement,) = record.attempts, record.placements
        predicted_s, first_s = placement.predicted_ttft_s, attempt.first_output_s
        if attempt.ended != COMPLETE or predicted_s is None or first_s is None:
            return
        pairs = self._ttfts_s.get(attempt.worker)
        if pairs is None:
            if len(self._ttfts_s) >= MOST_WORKERS:
                return
            pairs = self._ttfts_s[attempt.worker] = deque(maxlen=MOST_TTFTS)
        pairs.append((predicted_s, first_s - attempt.started_s))

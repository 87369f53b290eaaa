"""The requests that ended lately in this process."""

from collections import deque
from collections.abc import Container, Iterator, Mapping
from itertools import chain
from operator import attrgetter
from statistics import median

from trunkline.status import QUOTA_EXCEEDED
from trunkline.v1.fleet_pb2 import PredictedTtft
from trunkline_router.observe.recent.record_ring import RecordRing
from trunkline_router.observe.recent.told_request import ToldRequest
from trunkline_router.record.request_record import COMPLETE, RequestRecord

MOST_RECENT, MOST_NOTABLE = 512, 256
MOST_ROWS = 1 << 15  # of routing plans, in each of the two rings: some 10 MiB
SLOW_S = 0.5  # a later first token makes a request notable
MOST_TTFTS = 64  # of a worker
MOST_WORKERS = 1024  # whose TTFTs are kept

_END_S = attrgetter("end_s")


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

    def newest_first(self, *, only_notable: bool = False) -> Iterator[ToldRequest]:
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
        for told in self._notable.newest_first():
            if told.record.outcome == QUOTA_EXCEEDED:
                counts[told.record.tenant] += 1
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

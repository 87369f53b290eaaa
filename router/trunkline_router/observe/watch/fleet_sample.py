"""The fleet at one moment, and the moments of the last minutes."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from trunkline.v1 import fleet_pb2
from trunkline.v1.fleet_pb2 import HistoryPoint, WorkerTile

KEEPS_S = 600.0
MOST_POINTS = 600


@dataclass(frozen=True, slots=True)
class FleetSample:
    """Everything that operators see of the workers at one moment."""

    number: int  # counts up
    at_unix_ms: int
    now_s: float
    workers: Sequence[WorkerTile]


@dataclass(frozen=True, slots=True)
class Point:
    """A point of the history."""

    number: int  # of its sample
    at_s: float
    shown: HistoryPoint


class History:
    """The points of the last KEEPS_S, at most MOST_POINTS."""

    def __init__(self) -> None:
        self._points: deque[Point] = deque(maxlen=MOST_POINTS)

    def add(self, point: Point) -> None:
        self._points.append(point)
        while point.at_s - self._points[0].at_s > KEEPS_S:
            self._points.popleft()

    def since(self, number: int) -> list[HistoryPoint]:
        """Returns the points of samples after this one."""
        newer = []
        for point in reversed(self._points):
            if point.number <= number:
                break
            newer.append(point.shown)
        return newer[::-1]

    def __len__(self) -> int:
        return len(self._points)


def totals(at_unix_ms: int, tiles: Sequence[WorkerTile], hits: int, computed: int) -> HistoryPoint:
    """Returns the sums over all workers.

    hits, computed: prompt tokens of the last minute that were found in a cache, and that were not
    """
    point = HistoryPoint(
        at_unix_ms=at_unix_ms,
        workers=sum(tile.state == fleet_pb2.WORKER_STATE_READY for tile in tiles),
        running=sum(tile.running for tile in tiles),
        waiting=sum(tile.waiting for tile in tiles),
        prefill_tokens_per_s=sum(tile.batch.prefill_tokens_per_s for tile in tiles),
        decode_tokens_per_s=sum(tile.batch.decode_tokens_per_s for tile in tiles),
        padding_tokens_per_s=sum(tile.batch.padding_tokens_per_s for tile in tiles),
        kv_live_blocks=sum(tile.kv.live_blocks for tile in tiles),
        kv_cached_blocks=sum(tile.kv.cached_blocks for tile in tiles),
        kv_free_blocks=sum(tile.kv.free_blocks for tile in tiles),
        output_tokens_per_s=sum(tile.output_tokens_per_s for tile in tiles),
    )
    ttfts_s = [tile.ttft_p50_s for tile in tiles if tile.HasField("ttft_p50_s")]
    if ttfts_s:
        point.ttft_p50_s = median(ttfts_s)
    if hits + computed:
        point.hit_rate = hits / (hits + computed)
    return point

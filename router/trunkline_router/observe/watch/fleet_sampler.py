"""Samples the fleet and keeps the last minutes: one sampler in a process, whatever the number of watchers."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import grpc

from trunkline.v1 import fleet_pb2
from trunkline.v1.fleet_pb2 import HistoryPoint, PredictedTtft, WorkerTile
from trunkline_router.observe.watch.worker_tile import WorkerRates, worker_tile
from trunkline_router.workers.connected_worker import ConnectedWorker, WorkerCalls
from trunkline_router.workers.pool import Pools
from trunkline_router.workers.worker_link import WorkerLink
from trunkline_runtime.log import get_logger

KEEPS_S = 600.0
MOST_POINTS = 600
STATS_TIMEOUT_S = 10.0  # an engine answers between two steps
MOST_ASKED = 64  # workers that are asked for statistics at one time; the others have their turns


@dataclass(frozen=True, slots=True)
class FleetSample:
    """Everything that operators see of the workers at one moment."""

    number: int  # counts up
    at_unix_ms: int
    now_s: float
    workers: Sequence[WorkerTile]


class History:
    """The points of the last KEEPS_S, at most MOST_POINTS, with the numbers and times of their samples."""

    def __init__(self) -> None:
        self._points: deque[tuple[int, float, HistoryPoint]] = deque(maxlen=MOST_POINTS)

    def add(self, number: int, at_s: float, point: HistoryPoint) -> None:
        self._points.append((number, at_s, point))
        while at_s - self._points[0][1] > KEEPS_S:
            self._points.popleft()

    def since(self, number: int) -> list[HistoryPoint]:
        """Returns the points of samples after this one."""
        return [point for point_number, _, point in self._points if point_number > number]

    def __len__(self) -> int:
        return len(self._points)


def totals(at_unix_ms: int, tiles: Sequence[WorkerTile], hits: int, computed: int) -> HistoryPoint:
    """Returns the sums over all workers.

    hits, computed: prompt tokens of the last minute that were found in a cache, and that were not
    """
    ttfts_s = [tile.ttft_p50_s for tile in tiles if tile.HasField("ttft_p50_s")]
    return HistoryPoint(
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
        ttft_p50_s=median(ttfts_s) if ttfts_s else None,
        hit_rate=hits / (hits + computed) if hits + computed else None,
    )


@dataclass(frozen=True, slots=True)
class Periods:
    """Times between two samples.

    watched_s: while there is a watcher
    idle_s: otherwise, for the history
    answers_s: how long a sample waits for answers of workers; later ones count for the next sample
    """

    watched_s: float = 1.0
    idle_s: float = 5.0
    answers_s: float = 0.25


class FleetSampler:
    """Makes the samples while run() runs.

    wanted: set while there is a watcher. The first one does not wait for the end of an idle period
    predicted: returns how well TTFTs were predicted, by worker
    """

    def __init__(
        self,
        pools: Pools,
        wanted: asyncio.Event,
        predicted: Callable[[], Mapping[str, PredictedTtft]] = dict,
        periods: Periods | None = None,
    ) -> None:
        self._pools = pools
        self._wanted = wanted
        self._predicted = predicted
        self._periods = periods or Periods()
        self._unix_less_clock_s = time.time() - time.monotonic()
        self._rates: dict[ConnectedWorker, WorkerRates] = {}
        self._asked: dict[ConnectedWorker, asyncio.Task[None]] = {}
        self._first_asked = 0
        self.latest: FleetSample | None = None
        self._next = asyncio.Event()  # set by the next sample
        self.history = History()

    async def run(self) -> None:
        """Samples until it is cancelled. A failure is logged once; it must not end the router."""
        problem = ""
        try:
            while True:
                await self._rest()
                try:
                    await self._take()
                    problem = ""
                except Exception as error:
                    if repr(error) != problem:
                        problem = repr(error)
                        get_logger().error("the fleet cannot be sampled", exc_info=error)
                    await asyncio.sleep(self._periods.watched_s)
        finally:
            for task in self._asked.values():
                task.cancel()
            await asyncio.gather(*self._asked.values(), return_exceptions=True)

    async def after(self, number: int) -> FleetSample:
        """Returns the latest sample, as soon as there is one after this number."""
        while self.latest is None or self.latest.number <= number:
            await self._next.wait()
        return self.latest

    async def _rest(self) -> None:
        if self.latest is None or not self._wanted.is_set():
            try:
                async with asyncio.timeout(self._periods.idle_s):
                    await self._wanted.wait()
            except TimeoutError:
                return
        if self.latest is not None:
            since_s = time.monotonic() - self.latest.now_s
            await asyncio.sleep(max(0.0, self._periods.watched_s - since_s))

    async def _take(self) -> None:
        now_s = time.monotonic()
        links = list(self._pools.links)
        await self._ask(links)
        self._pools.hot_prefixes.fold(now_s)
        predicted, number = self._predicted(), 1 if self.latest is None else self.latest.number + 1
        at_unix_ms = self._unix_ms(now_s)
        tiles = []
        for link in links:
            name = "" if link.model is None else link.model.worker_id
            rates = None if link.worker is None else self._rates.get(link.worker)
            tiles.append(worker_tile(link, rates or WorkerRates(), predicted.get(name), now_s, self._unix_ms))
        shown = {tile.address for tile in tiles}
        tiles += [
            WorkerTile(address=address, state=fleet_pb2.WORKER_STATE_CONNECTING, reason=problem)
            for address, problem in self._pools.set_aside.items()
            if address not in shown
        ]
        self._add_since(tiles, at_unix_ms)
        tokens = [rates.hit_tokens() for rates in self._rates.values()]
        point = totals(at_unix_ms, tiles, sum(hits for hits, _ in tokens), sum(computed for _, computed in tokens))
        self.history.add(number, now_s, point)
        self.latest = FleetSample(number, at_unix_ms, now_s, tiles)
        self._next.set()
        self._next = asyncio.Event()

    def _add_since(self, tiles: list[WorkerTile], at_unix_ms: int) -> None:
        """Adds since when each worker is in its state."""
        before = {} if self.latest is None else {tile.address: tile for tile in self.latest.workers}
        for tile in tiles:
            former = before.get(tile.address, tile)
            is_same = former is not tile and former.state == tile.state
            tile.state_since_unix_ms = former.state_since_unix_ms if is_same else at_unix_ms

    async def _ask(self, links: list[WorkerLink]) -> None:
        """Asks workers for their statistics, each one once at a time, and waits shortly for their answers."""
        connected = {link.worker: link.calls for link in links if link.worker is not None and link.calls is not None}
        self._rates = {worker: rates for worker, rates in self._rates.items() if worker in connected}
        turn = list(connected)
        first = self._first_asked % len(turn) if turn else 0
        self._first_asked = first + MOST_ASKED
        for worker in (turn[first:] + turn[:first])[:MOST_ASKED]:
            if worker not in self._asked and (calls := connected[worker]) is not None:
                task = self._asked[worker] = asyncio.create_task(self._ask_one(worker, calls))
                task.add_done_callback(lambda _, worker=worker: self._asked.pop(worker))  # type: ignore[misc]
        if self._asked:
            await asyncio.wait(self._asked.values(), timeout=self._periods.answers_s)

    async def _ask_one(self, worker: ConnectedWorker, calls: WorkerCalls) -> None:
        try:
            stats = await calls.stats(STATS_TIMEOUT_S)
        except grpc.aio.AioRpcError:
            return  # a worker that is lost or hangs is found by its link; its tile keeps the report before
        self._rates.setdefault(worker, WorkerRates()).take(stats, time.monotonic())

    def _unix_ms(self, time_s: float) -> int:
        return int((time_s + self._unix_less_clock_s) * 1e3)

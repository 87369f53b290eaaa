"""One worker as watchers of the fleet see it, and what it did lately, from the counters that it reports.

A worker's numbers are shown and never acted on. They may be wrong, so no computation here fails on any number."""

from collections import deque
from collections.abc import Callable, Sequence
from math import isfinite

from trunkline.v1 import fleet_pb2
from trunkline.v1.fleet_pb2 import BatchTile, KvTile, LaneTile, PredictedTtft, WorkerTile
from trunkline.v1.worker_pb2 import Distribution, GetStatsResponse, LaneStats
from trunkline_router.observe.recent.viewer import Viewer
from trunkline_router.workers.connected_worker import ConnectedWorker
from trunkline_router.workers.worker_link import ASIDE, BROKEN, CONNECTING, DRAINING, HUNG, READY, WorkerLink, state_of

HIT_RATE_S = 60.0  # the hit rate is that of this time
MOST_REPORTS = 128  # that are kept for it: about two a second
LEAST_ELAPSED_S = 0.01  # between two reports
NUM_LANES = 3
SHOWN = {
    CONNECTING: fleet_pb2.WORKER_STATE_CONNECTING,
    READY: fleet_pb2.WORKER_STATE_READY,
    DRAINING: fleet_pb2.WORKER_STATE_DRAINING,
    HUNG: fleet_pb2.WORKER_STATE_HUNG,
    BROKEN: fleet_pb2.WORKER_STATE_BROKEN,
    ASIDE: fleet_pb2.WORKER_STATE_BROKEN,  # the reason says which
}
REASONS = {HUNG: "it has work, and sends nothing", BROKEN: "requests failed there recently"}
MOST_BLOCKS = (1 << 32) - 1  # that the field holds


class WorkerRates:
    """The reports of one life of a worker."""

    def __init__(self) -> None:
        # uptime, prompt tokens found in the cache and computed
        self._hits: deque[tuple[float, int, int]] = deque(maxlen=MOST_REPORTS)
        self._before: GetStatsResponse | None = None
        self.stats: GetStatsResponse | None = None  # the latest report
        self.reported_s = 0.0  # when it came

    def take(self, stats: GetStatsResponse, now_s: float) -> None:
        """Takes a report. One of the same moment as the last one says nothing new, and one of no moment nothing."""
        if not isfinite(stats.uptime_s) or (self.stats is not None and stats.uptime_s == self.stats.uptime_s):
            return
        self._before, self.stats, self.reported_s = self.stats, stats, now_s
        steps = stats.steps
        if self._hits and stats.uptime_s <= self._hits[-1][0]:
            self._hits.clear()
        self._hits.append((stats.uptime_s, steps.prefix_hit_tokens, steps.prefill_tokens))
        while len(self._hits) > 2 and stats.uptime_s - self._hits[0][0] > HIT_RATE_S:
            self._hits.popleft()

    def _per_s(self, total_of: Callable[[GetStatsResponse], float]) -> float | None:
        """How fast a total grew between the last two reports, by the worker's clock; None if they are too near."""
        if self._before is None or self.stats is None:
            return None
        elapsed_s = self.stats.uptime_s - self._before.uptime_s
        if not (isfinite(elapsed_s) and elapsed_s >= LEAST_ELAPSED_S):
            return None
        per_s = (total_of(self.stats) - total_of(self._before)) / elapsed_s
        return per_s if isfinite(per_s) and per_s > 0 else 0.0

    def hit_tokens(self) -> tuple[int, int]:
        """Returns the prompt tokens of the last minute that were found in the cache, and those that were computed."""
        if not self._hits:
            return 0, 0
        (_, first_hits, first_computed), (_, hits, computed) = self._hits[0], self._hits[-1]
        return max(0, hits - first_hits), max(0, computed - first_computed)

    @property
    def hit_rate(self) -> float | None:
        hits, computed = self.hit_tokens()
        return hits / (hits + computed) if hits + computed else None

    def batch(self) -> BatchTile | None:
        """Returns the composition of the steps between the last two reports."""
        steps_per_s = self._per_s(lambda stats: stats.steps.steps)
        if steps_per_s is None or self.stats is None:
            return None

        def per_s(total: str) -> float:
            return self._per_s(lambda stats: getattr(stats.steps, total)) or 0.0

        return BatchTile(
            steps_per_s=steps_per_s,
            prefill_tokens_per_s=per_s("prefill_tokens"),
            decode_tokens_per_s=per_s("decode_tokens"),
            padding_tokens_per_s=per_s("padding_tokens"),
            sequences=self.stats.last_step.sequences,
            busy_share=min(1.0, per_s("device_time_s")),
        )

    def output_tokens_per_s(self) -> float | None:
        return self._per_s(lambda stats: sum(lane.output_tokens for lane in _lanes(stats)))

    def preemptions_per_s(self) -> float | None:
        return self._per_s(lambda stats: stats.steps.preemptions)

    def lanes(self) -> list[LaneTile]:
        return [] if self.stats is None else [_lane(lane) for lane in _lanes(self.stats)]

    def ttft_p50_s(self) -> float | None:
        """Returns the median time to first token in the lane that has served the most."""
        if self.stats is None:
            return None
        recent = [lane.ttft_s for lane in _lanes(self.stats) if lane.ttft_s.p50]
        return _shown(max(recent, key=lambda ttft_s: ttft_s.count).p50) if recent else None


def _lanes(stats: GetStatsResponse) -> Sequence[LaneStats]:
    return stats.lanes[:NUM_LANES]


def _lane(lane: LaneStats) -> LaneTile:
    return LaneTile(
        lane=lane.lane,
        running=lane.running,
        waiting=lane.waiting,
        ttft_p50_s=_median(lane.ttft_s),
        ttft_p99_s=_shown(lane.ttft_s.p99) if lane.ttft_s.p50 else None,
        itl_p50_s=_median(lane.itl_s),
    )


def _median(times_s: Distribution) -> float | None:
    return _shown(times_s.p50) if times_s.p50 else None


def _shown(value: float) -> float | None:
    return value if isfinite(value) else None


def shown_state(link: WorkerLink, now_s: float) -> "tuple[fleet_pb2.WorkerState.ValueType, str]":
    """Returns a worker's state, and its problem in one line, "" if there is none."""
    worker, state = link.worker, state_of(link)
    if worker is None:
        return SHOWN[state], link.problem
    if state == READY:
        return SHOWN[state], worker.distrust(now_s)
    return SHOWN[state], worker.aside if state == ASIDE else REASONS.get(state, "")


def worker_tile(
    link: WorkerLink,
    rates: WorkerRates,
    predicted: PredictedTtft | None,
    now_s: float,
    unix_ms_of: Callable[[float], int],
) -> WorkerTile:
    """Returns everything that operators see of a worker.

    rates: of its present life
    predicted: how well its times to first token were predicted
    unix_ms_of: turns a time of the same clock as `now_s` into Unix time
    """
    state, reason = shown_state(link, now_s)
    tile = WorkerTile(address=link.address, state=state, reason=reason, predicted_ttft=predicted)
    if link.model is not None:
        tile.worker_id, tile.model = link.model.worker_id, link.model.model
    if link.worker is not None:
        tile.MergeFrom(_load(link.worker))
        if rates.stats is not None:
            tile.MergeFrom(_lately(rates, rates.stats, unix_ms_of))
    return tile


def _load(worker: ConnectedWorker) -> WorkerTile:
    """What a connected worker has to do now."""
    load, model = worker.load, worker.model
    return WorkerTile(
        running=load.running,
        waiting=load.waiting,
        open_choices=worker.open_choices,
        most_running=model.max_running_requests or None,
        kv=KvTile(
            live_blocks=load.kv_live_blocks,
            cached_blocks=load.kv_cached_blocks,
            free_blocks=load.kv_free_blocks,
            block_tokens=model.block_size,
        ),
        index_accuracy=worker.accuracy.share,
        index_accuracy_requests=worker.accuracy.num_requests,
        routed_by_load=worker.routed_by_load,
    )


def _lately(rates: WorkerRates, stats: GetStatsResponse, unix_ms_of: Callable[[float], int]) -> WorkerTile:
    """What it did lately."""
    return WorkerTile(
        sampled_unix_ms=unix_ms_of(rates.reported_s),
        lanes=rates.lanes(),
        batch=rates.batch(),
        output_tokens_per_s=rates.output_tokens_per_s(),
        preemptions_per_s=rates.preemptions_per_s(),
        ttft_p50_s=rates.ttft_p50_s(),
        hit_rate=rates.hit_rate,
        cost_per_million_output_tokens=stats.cost_per_million_output_tokens or None,
        expert_imbalance=_shown(stats.expert_imbalance) or None,
    )


def tile_for(viewer: Viewer, tile: WorkerTile) -> WorkerTile | None:
    """Returns a worker as the viewer may see it; None if it may not. Users see nothing that depends on the requests of
    others."""
    if not viewer.is_operator:
        if not viewer.may_see_model(tile.model):
            return None
        return WorkerTile(worker_id=tile.worker_id if viewer.sees_cache else "", model=tile.model, state=tile.state)
    if viewer.sees_cache:
        return tile
    shown = WorkerTile()
    shown.CopyFrom(tile)
    for name in ("hit_rate", "index_accuracy", "index_accuracy_requests"):
        shown.ClearField(name)
    if shown.HasField("kv"):
        shown.kv.free_blocks = min(MOST_BLOCKS, shown.kv.free_blocks + shown.kv.cached_blocks)
        shown.kv.cached_blocks = 0
    return shown

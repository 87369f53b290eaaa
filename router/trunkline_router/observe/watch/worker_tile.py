"""One worker as watchers of the fleet see it."""

from collections.abc import Callable

from trunkline.v1 import fleet_pb2
from trunkline.v1.fleet_pb2 import KvTile, PredictedTtft, WorkerTile
from trunkline_router.observe.watch.worker_rates import WorkerRates
from trunkline_router.workers.worker_link import ASIDE, BROKEN, CONNECTING, DRAINING, HUNG, READY, WorkerLink, state_of

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
    worker = link.worker
    if worker is None:
        return tile
    load, model = worker.load, worker.model
    tile.running, tile.waiting, tile.open_choices = load.running, load.waiting, worker.open_choices
    if model.max_running_requests:
        tile.most_running = model.max_running_requests
    tile.kv.CopyFrom(
        KvTile(
            live_blocks=load.kv_live_blocks,
            cached_blocks=load.kv_cached_blocks,
            free_blocks=load.kv_free_blocks,
            block_tokens=model.block_size,
        )
    )
    tile.index_accuracy, tile.index_accuracy_requests = worker.accuracy.share, worker.accuracy.num_requests
    tile.routed_by_load = worker.routed_by_load
    if rates.stats is not None:
        _add_rates(tile, rates, unix_ms_of)
    return tile


def _add_rates(tile: WorkerTile, rates: WorkerRates, unix_ms_of: Callable[[float], int]) -> None:
    tile.sampled_unix_ms = unix_ms_of(rates.reported_s)
    tile.lanes.extend(rates.lanes())
    if (batch := rates.batch()) is not None:
        tile.batch.CopyFrom(batch)
    values = {
        "output_tokens_per_s": rates.output_tokens_per_s(),
        "preemptions_per_s": rates.preemptions_per_s(),
        "ttft_p50_s": rates.ttft_p50_s(),
        "hit_rate": rates.hit_rate,
    }
    if rates.stats is not None and rates.stats.cost_per_million_output_tokens:
        values["cost_per_million_output_tokens"] = rates.stats.cost_per_million_output_tokens
    for name, value in values.items():
        if value is not None:
            setattr(tile, name, value)


def public_tile(tile: WorkerTile, *, sees_workers: bool) -> WorkerTile:
    """Returns what users see of a worker: nothing that depends on the requests of others."""
    return WorkerTile(worker_id=tile.worker_id if sees_workers else "", model=tile.model, state=tile.state)


def without_cache(tile: WorkerTile) -> WorkerTile:
    """Returns what operators without the right to see caches see."""
    shown = WorkerTile()
    shown.CopyFrom(tile)
    for name in ("hit_rate", "index_accuracy", "index_accuracy_requests"):
        shown.ClearField(name)
    if shown.HasField("kv"):
        shown.kv.free_blocks = min(MOST_BLOCKS, shown.kv.free_blocks + shown.kv.cached_blocks)
        shown.kv.cached_blocks = 0
    return shown

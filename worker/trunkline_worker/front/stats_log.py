"""Logs a compact line of engine statistics at intervals."""

import asyncio
from typing import Any

from trunkline.names import lane_name
from trunkline.status import RequestRefused
from trunkline.v1.worker_pb2 import Distribution, GetStatsResponse
from trunkline_runtime.log import get_logger
from trunkline_worker.front.front import Front

MILLISECONDS = 1e3


async def log_stats(front: Front, interval_s: float) -> None:
    """Logs statistics until it is cancelled or the engine ends. Skips intervals without engine steps."""
    log = get_logger()
    steps_before = 0
    while True:
        await asyncio.sleep(interval_s)
        try:
            stats = await front.stats()
        except RequestRefused:
            return
        if stats.steps.steps != steps_before:
            steps_before = stats.steps.steps
            log.info("engine statistics", **summary(stats))


def summary(stats: GetStatsResponse) -> dict[str, Any]:
    """Returns the fields of the log line. Times are in milliseconds, as p50/p99 of the last one to two minutes."""
    load, steps = stats.load, stats.steps
    line: dict[str, Any] = {
        "running": load.running,
        "waiting": load.waiting,
        "kv_live": load.kv_live_blocks,
        "kv_cached": load.kv_cached_blocks,
        "kv_free": load.kv_free_blocks,
        "output_tok_s": round(stats.output_tokens_per_s, 1),
        "steps": steps.steps,
        "prefill_tokens": steps.prefill_tokens,
        "decode_tokens": steps.decode_tokens,
        "prefix_hit_tokens": steps.prefix_hit_tokens,
        "preemptions": steps.preemptions,
        "host_ms": _quantiles(stats.host_time_s),
        "device_ms": _quantiles(stats.device_time_s),
    }
    if steps.padding_tokens:
        line["padding_tokens"] = steps.padding_tokens
    if stats.cost_per_million_output_tokens:
        line["cost_per_million"] = round(stats.cost_per_million_output_tokens, 3)
    for lane in stats.lanes:
        if lane.accepted or lane.refused:
            line[lane_name(lane.lane)] = (
                f"accepted={lane.accepted} refused={lane.refused} waiting={lane.waiting} "
                f"queue={_quantiles(lane.queue_time_s)} ttft={_quantiles(lane.ttft_s)} itl={_quantiles(lane.itl_s)} "
                f"tpot={_quantiles(lane.tpot_s)} e2e={_quantiles(lane.e2e_s)}"
            )
    return line


def _quantiles(distribution: Distribution) -> str:
    return f"{distribution.p50 * MILLISECONDS:.3g}/{distribution.p99 * MILLISECONDS:.3g}"

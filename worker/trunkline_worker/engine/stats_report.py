"""EngineStats as the response to GetStats."""

from trunkline.v1.worker_pb2 import (
    Distribution,
    GetStatsResponse,
    LaneStats,
    LoadSample,
    StepSample,
    StepTotals,
    TenantStats,
)
from trunkline_worker.lanes.lanes import Lane, lane_number
from trunkline_worker.scheduler.scheduler import Scheduler
from trunkline_worker.scheduler.stats import EngineStats, Histogram

MAX_TENANTS = 100
SECONDS_PER_HOUR = 3600
MILLION = 1_000_000


def stats_report(
    stats: EngineStats, scheduler: Scheduler, load: LoadSample, *, price_per_hour: float, now_s: float
) -> GetStatsResponse:
    """The response to GetStats, with at most MAX_TENANTS tenants: active ones first, then by service given."""
    rate = stats.output_tokens_per_s(now_s)
    last, total = stats.last, stats.total
    response = GetStatsResponse(
        uptime_s=now_s - stats.started_s,
        load=load,
        steps=StepTotals(
            steps=stats.steps,
            prefill_tokens=total.prefill_tokens,
            decode_tokens=total.decode_tokens,
            padding_tokens=total.padding_tokens,
            prefix_hit_tokens=stats.prefix_hit_tokens,
            admissions=stats.admissions,
            preemptions=stats.preemptions,
            preempted_tokens=stats.preempted_tokens,
            stale_results=stats.stale_results,
            host_time_s=total.host_time_s,
            device_time_s=total.device_time_s,
        ),
        last_step=StepSample(
            prefill_tokens=last.prefill_tokens,
            decode_tokens=last.decode_tokens,
            padding_tokens=last.padding_tokens,
            sequences=last.sequences,
            host_time_us=int(last.host_time_s * 1e6),
            device_time_us=int(last.device_time_s * 1e6),
        ),
        host_time_s=_distribution(stats.host_time),
        device_time_s=_distribution(stats.device_time),
        output_tokens_per_s=rate,
        cost_per_million_output_tokens=price_per_hour / SECONDS_PER_HOUR / rate * MILLION if rate else 0.0,
    )
    for lane in Lane:
        counts = stats.lanes[lane]
        response.lanes.append(
            LaneStats(
                lane=lane_number(lane),  # type: ignore[arg-type]
                running=sum(sequence.lane is lane for sequence in scheduler.running),
                waiting=sum(sequence.lane is lane for sequence in scheduler.waiting),
                accepted=counts.accepted,
                refused=counts.refused,
                finished=counts.finished,
                aborted=counts.aborted,
                expired=counts.expired,
                output_tokens=counts.output_tokens,
                queue_time_s=_distribution(counts.queue_time),
                ttft_s=_distribution(counts.ttft),
                itl_s=_distribution(counts.itl),
                tpot_s=_distribution(counts.tpot),
                e2e_s=_distribution(counts.e2e),
            )
        )
    accounts = [account for lane in scheduler.waiting.lanes for account in lane]
    accounts.sort(key=lambda account: (account.is_idle, -account.given))
    response.tenants.extend(
        TenantStats(
            tenant=account.tenant,
            lane=lane_number(account.lane),  # type: ignore[arg-type]
            weight=account.weight,
            virtual_tokens=account.virtual_tokens,
            running=account.running,
            waiting=account.waiting,
            input_tokens=account.input_tokens,
            cached_tokens=account.cached_tokens,
            output_tokens=account.output_tokens,
        )
        for account in accounts[:MAX_TENANTS]
    )
    return response


def _distribution(histogram: Histogram) -> Distribution:
    p50, p90, p99 = histogram.quantiles(0.5, 0.9, 0.99)
    return Distribution(count=histogram.count, sum=histogram.sum, p50=p50, p90=p90, p99=p99)

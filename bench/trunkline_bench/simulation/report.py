"""Runs as rows of a table."""

from trunkline_bench.reports.statistics import percentile
from trunkline_bench.simulation.traces.trace_lines import LANES
from trunkline_bench.simulation.worker.replay import Replayed
from trunkline_worker.lanes.lanes import Lane


def ttfts(run: Replayed, lane: str | None = None) -> list[float]:
    return [
        outcome.ttft_s
        for outcome in run.outcomes
        if outcome.ttft_s is not None and (lane is None or outcome.request.lane == lane)
    ]


def e2es(run: Replayed, lane: str | None = None) -> list[float]:
    return [
        outcome.done_s - outcome.request.arrival_s
        for outcome in run.outcomes
        if outcome.done_s is not None and not outcome.refused and (lane is None or outcome.request.lane == lane)
    ]


def output_rate(run: Replayed, lane: str | None = None) -> float:
    """Output tokens per second; 0 where everything was refused at once."""
    tokens = sum(outcome.output_tokens for outcome in run.outcomes if lane is None or outcome.request.lane == lane)
    return tokens / run.duration_s if tokens else 0.0


def lanes_of(run: Replayed) -> list[str]:
    """The lanes that the requests came in, highest first."""
    present = {outcome.request.lane for outcome in run.outcomes}
    return [lane for lane in LANES if lane in present]


COLUMNS = (
    "output tok/s", "TTFT p50 / p90 / p99, s", "ITL p50 / p99, ms", "E2E p50 / p99, s", "padding", "prefix hits",
    "preemptions", "refused",
)  # fmt: skip


def rows(name: str, run: Replayed) -> dict[str, list[str]]:
    """One run; where its requests came in several lanes, all of them together and each by itself."""
    present = lanes_of(run)
    if len(present) == 1:
        return {name: row(run)}
    return {f"{name}, all lanes": row(run)} | {f"{name}, {lane}": row(run, lane) for lane in present}


def row(run: Replayed, lane: str | None = None) -> list[str]:
    """One run, or one lane of it, in the order of COLUMNS. What is counted otherwise is left out: steps, which serve
    all lanes at once, for one lane; times between tokens, which are counted by lane, for several."""
    steps, first, whole = run.stats.steps, ttfts(run, lane), e2es(run, lane)
    computed = steps.prefill_tokens + steps.decode_tokens + steps.padding_tokens
    prompts = steps.prefill_tokens + steps.prefix_hit_tokens
    return [
        f"{output_rate(run, lane):,.0f}",
        seconds(first, 0.5, 0.9, 0.99),
        itl_ms(run, lanes_of(run) if lane is None else [lane]),
        seconds(whole, 0.5, 0.99),
        f"{steps.padding_tokens / computed:.0%}" if computed and lane is None else "-",
        f"{steps.prefix_hit_tokens / prompts:.1%}" if prompts and lane is None else "-",
        f"{steps.preemptions:,}" if lane is None else "-",
        f"{sum(bool(o.refused) for o in run.outcomes if lane is None or o.request.lane == lane):,}",
    ]


def seconds(values: list[float], *shares: float) -> str:
    return " / ".join(f"{percentile(values, share):.3g}" for share in shares) if values else "-"


def itl_ms(run: Replayed, lanes: list[str]) -> str:
    """p50 and p99 of the times between tokens, if all are of one lane."""
    if len(lanes) != 1:
        return "-"
    itl = run.stats.lanes[Lane[lanes[0].upper()]].itl_s
    return f"{itl.p50 * 1e3:.1f} / {itl.p99 * 1e3:.1f}" if itl.count else "-"

"""Table rows with the figures of runs."""

from trunkline_bench.reports.statistics import percentile
from trunkline_bench.simulation.traces.trace_lines import LANES
from trunkline_bench.simulation.worker.replay import Replayed
from trunkline_worker.step.lanes import Lane


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
    """Output tokens per second; 0 if every request was refused."""
    tokens = sum(outcome.output_tokens for outcome in run.outcomes if lane is None or outcome.request.lane == lane)
    return tokens / run.duration_s if tokens else 0.0


def lanes_of(run: Replayed) -> list[str]:
    """The lanes of the requests, highest first."""
    present = {outcome.request.lane for outcome in run.outcomes}
    return [lane for lane in LANES if lane in present]


COLUMNS = (
    "output tok/s", "TTFT p50 / p90 / p99, s", "ITL p50 / p99, ms", "E2E p50 / p99, s", "padding", "prefix hits",
    "preemptions", "refused",
)  # fmt: skip


def rows(name: str, run: Replayed) -> dict[str, list[str]]:
    """A row for a run; if its requests are in several lanes, a row for all lanes and one for each."""
    present = lanes_of(run)
    if len(present) == 1:
        return {name: row(run)}
    return {f"{name}, all lanes": row(run)} | {f"{name}, {lane}": row(run, lane) for lane in present}


def row(run: Replayed, lane: str | None = None) -> list[str]:
    """Cells for a run, or for one lane of it, in the order of COLUMNS. Unknown figures are "-": those of steps are not
    counted by lane, and times between tokens only by lane."""
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
    """p50 and p99 of the times between tokens; "-" if there are several lanes."""
    if len(lanes) != 1:
        return "-"
    itl = run.stats.lanes[Lane[lanes[0].upper()]].itl_s
    return f"{itl.p50 * 1e3:.1f} / {itl.p99 * 1e3:.1f}" if itl.count else "-"

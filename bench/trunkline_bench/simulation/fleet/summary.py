"""The figures of a run, for its counted requests and over time."""

import math
from dataclasses import asdict, dataclass
from statistics import fmean, pstdev
from typing import Any

from trunkline_bench.reports.statistics import percentile
from trunkline_bench.simulation.fleet.fleet import FleetOutcome, FleetRun
from trunkline_worker.scheduler.stats import Histogram
from trunkline_worker.step.lanes import Lane

BIN_S = 10.0  # of figures over time
COLUMNS = (
    "hit rate", "of the ideal", "of what fits", "TTFT p50 / p90 / p99, s", "error of predicted TTFT, p50 / p90",
    "delay p99, s", "ITL p50 / p99, ms",
    "output tok/s", "busy", "CV of busy time", "CV of prefill", "refused", "preemptions",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class OverTime:
    """One entry per bin of BIN_S from the run's start; NaN for a bin without requests."""

    time_s: list[float]
    hit_rate: list[float]  # of requests by arrival, as all fields below
    ideal_hit_rate: list[float]
    ttft_p50_s: list[float]
    ttft_p99_s: list[float]
    load_cv: list[float]  # coefficient of variation over workers of uncached prompt tokens sent to them


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of a run."""

    policy: str
    workers: int
    routers: int
    requests: int
    requests_per_s: float
    hit_rate: float
    ideal_hit_rate: float
    fitting_hit_rate: float  # of one cache with the capacity of all pools
    predicted_hit_rate: float  # as the routers expected
    ttft_s: tuple[float, float, float]  # p50, p90, p99
    delay_p99_s: float  # see FleetOutcome.delay_s
    itl_s: tuple[float, float]  # p50, p99, of all streams
    output_tokens_per_s: float
    busy_share: float
    busy_cv: float
    prefill_cv: float  # of computed prompt tokens, over workers
    refused: int
    preemptions: int
    given_up: bool
    over_time: OverTime
    ttft_error: tuple[float, float]  # p50, p90, see FleetOutcome.ttft_error; NaN: not predicted

    def to_json(self) -> dict[str, Any]:
        """The figures, rounded to five digits; NaN becomes None."""
        return {name: _rounded(value) for name, value in asdict(self).items()}


def summary(run: FleetRun) -> Summary:
    """The figures of a run, which must have at least one counted request."""
    counted = run.counted
    ttfts = [outcome.ttft_s for outcome in counted if outcome.ttft_s is not None]
    errors = [outcome.ttft_error for outcome in counted if outcome.ttft_error is not None]
    delays = [outcome.delay_s for outcome in counted if outcome.delay_s is not None]
    span_s = max(run.until_s - run.from_s, 1e-9)
    prompts = sum(outcome.request.prompt_tokens for outcome in counted if not outcome.refused)
    itl = Histogram()
    for worker in run.workers:
        for lane in Lane:
            itl.include(worker.stats.lanes[lane].itl)
    p50, p99 = itl.quantiles(0.5, 0.99)
    return Summary(
        policy=run.fleet.policy,
        workers=run.fleet.workers,
        routers=run.fleet.routers,
        requests=len(counted),
        requests_per_s=len(counted) / span_s,
        hit_rate=_share(sum(outcome.cached_tokens for outcome in counted), prompts),
        ideal_hit_rate=_share(sum(outcome.ideal_tokens for outcome in counted), prompts),
        fitting_hit_rate=_share(sum(outcome.fitting_tokens for outcome in counted), prompts),
        predicted_hit_rate=_share(sum(outcome.predicted_tokens for outcome in counted), prompts),
        ttft_s=(percentile(ttfts, 0.5), percentile(ttfts, 0.9), percentile(ttfts, 0.99)),
        delay_p99_s=percentile(delays, 0.99),
        itl_s=(p50, p99),
        output_tokens_per_s=sum(outcome.output_tokens for outcome in counted) / (run.duration_s - run.from_s),
        busy_share=fmean(run.busy_s) / span_s,
        busy_cv=variation(run.busy_s),
        prefill_cv=variation([worker.stats.total.prefill_tokens for worker in run.workers]),
        refused=sum(bool(outcome.refused) for outcome in counted),
        preemptions=sum(worker.stats.preemptions for worker in run.workers),
        given_up=run.given_up,
        over_time=_over_time(run),
        ttft_error=(percentile(errors, 0.5), percentile(errors, 0.9)),
    )


def row(figures: Summary) -> list[str]:
    """Cells in the order of COLUMNS."""
    return [
        f"{figures.hit_rate:.1%}",
        f"{_share(figures.hit_rate, figures.ideal_hit_rate):.1%}",
        f"{_share(figures.hit_rate, figures.fitting_hit_rate):.1%}",
        " / ".join(f"{time_s:.3g}" for time_s in figures.ttft_s),
        " / ".join(f"{error:.0%}" for error in figures.ttft_error),
        f"{figures.delay_p99_s:.3g}",
        " / ".join(f"{time_s * 1e3:.0f}" for time_s in figures.itl_s),
        f"{figures.output_tokens_per_s:,.0f}",
        f"{figures.busy_share:.0%}",
        f"{figures.busy_cv:.3f}",
        f"{figures.prefill_cv:.3f}",
        f"{figures.refused:,}",
        f"{figures.preemptions:,}",
    ]


def variation(values: list[float] | list[int]) -> float:
    """The coefficient of variation; 0 if the mean is 0."""
    mean = fmean(values)
    return pstdev(values) / mean if mean else 0.0


def _over_time(run: FleetRun) -> OverTime:
    bins: list[list[FleetOutcome]] = [[] for _ in range(int(run.until_s / BIN_S) + 1)]
    for outcome in run.outcomes:
        if outcome.worker is not None:
            bins[int(outcome.request.arrival_s / BIN_S)].append(outcome)
    ttfts = [[o.ttft_s for o in among if o.ttft_s is not None] for among in bins]
    prompts = [sum(o.request.prompt_tokens for o in among) for among in bins]
    cached = [sum(o.cached_tokens for o in among) for among in bins]
    ideal = [sum(o.ideal_tokens for o in among) for among in bins]
    return OverTime(
        time_s=[number * BIN_S for number in range(len(bins))],
        hit_rate=[_share(found, whole) for found, whole in zip(cached, prompts, strict=True)],
        ideal_hit_rate=[_share(found, whole) for found, whole in zip(ideal, prompts, strict=True)],
        ttft_p50_s=[percentile(values, 0.5) for values in ttfts],
        ttft_p99_s=[percentile(values, 0.99) for values in ttfts],
        load_cv=[_load_cv(among, run.fleet.workers) for among in bins],
    )


def _load_cv(among: list[FleetOutcome], workers: int) -> float:
    tokens = [0] * workers
    for outcome in among:
        assert outcome.worker is not None
        tokens[outcome.worker] += outcome.request.prompt_tokens - outcome.cached_tokens
    return variation(tokens)


def _share(part: float, whole: float) -> float:
    return part / whole if whole else math.nan


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(part) for part in value]
    if isinstance(value, float):
        return None if math.isnan(value) else float(f"{value:.5g}")
    return value

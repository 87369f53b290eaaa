"""What was asked of the fleet, line by line, and what the runs say about it."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from trunkline_bench.simulation.fleet.workloads import BASE, GOAL_S, OURS, WORKLOADS

Run = dict[str, Any]  # a run's figures, as sweep.py writes them
Border = tuple[float, float]  # the highest load below all that missed the goal; the lowest that missed it; 0: none

LOADS = (0.5, 0.8, 1.0)  # what the goals are for
LEAST_HITS = 0.95  # of what fits
MOST_BUSY_CV, BUSY_LOAD = 0.1, 0.8  # the one is for this load and more
COLUMNS = ("measured, ours", "verdict")


def rows(runs: Sequence[Run]) -> dict[str, list[str]]:
    """Goal by goal; in each, workload by workload and fleet by fleet. Runs through several routers are left out."""
    runs = [run for run in runs if run["routers"] == 1]
    fleets = sorted({(run["workload"], run["workers"]) for run in runs})
    found = {}
    for rows_of in (_hits, _highest_load, _p99, _p50, _busy):
        for workload, workers in fleets:
            among = [run for run in runs if (run["workload"], run["workers"]) == (workload, workers)]
            goal, measured, verdict = rows_of(workload, among)
            found[f"{goal}: {workload}, {workers} workers"] = [measured, verdict]
    return found


def judged_s(run: Run) -> float | None:
    """The p99 that the run's workload is judged by; None of a run in which nothing came to its first token."""
    ttft_s, delay_s = run["ttft_s"][2], run["delay_p99_s"]
    return None if ttft_s is None or delay_s is None else WORKLOADS[run["workload"]].judged_s(ttft_s, delay_s)


def ratio(value: float | None, base: float | None) -> float | None:
    """None where there is nothing to compare with: a delay that is none is no measure."""
    return value / base if value is not None and base is not None and base > 0 else None


def border(runs: Sequence[Run], policy: str) -> Border:
    """Of one workload and fleet; runs at a fixed load count as well as those of a search."""
    mine = [run for run in runs if run["policy"] == policy]
    missed = min((run["load"] for run in mine if not run["meets_goal"]), default=0.0)
    met = [run["load"] for run in mine if run["meets_goal"] and (not missed or run["load"] < missed)]
    return max(met, default=0.0), missed


def times(one: Border, base: Border) -> Border:
    """How many times the load of `base` the other carries, at least and at most; 0 and infinity: not known."""
    return (one[0] / base[1] if base[1] else 0.0), (one[1] / base[0] if one[1] and base[0] else math.inf)


def times_text(one: Border, base: Border) -> str:
    least, most = times(one, base)
    if least and most < math.inf:
        return f"{least:.2f} to {most:.2f}"
    if least:
        return f"{least:.2f} at least"
    return f"{most:.2f} at most" if most < math.inf else "-"


def _hits(workload: str, runs: Sequence[Run]) -> tuple[str, str, str]:
    def measured(run: Run, _: Sequence[Run]) -> tuple[str, bool]:
        of_ideal = ratio(run["hit_rate"], run["ideal_hit_rate"]) or 0.0
        of_fitting = ratio(run["hit_rate"], run["fitting_hit_rate"]) or 0.0
        return f"{of_ideal:.1%} of the ideal, {of_fitting:.1%} of what fits", of_fitting >= LEAST_HITS

    return f"hits ≥ {LEAST_HITS:.0%} of what fits", *_at_loads(runs, measured)


def _highest_load(workload: str, runs: Sequence[Run]) -> tuple[str, str, str]:
    asked = WORKLOADS[workload].times_base
    goal = f"load at {WORKLOADS[workload].judged_by} p99 ≤ {GOAL_S:g} s ≥ {asked:g} times round robin's"
    ours, base = border(runs, OURS), border(runs, BASE)
    least, most = times(ours, base)
    verdict = "holds" if least >= asked else "**misses**" if most < asked else "open"
    return goal, f"{_between(ours)}; round robin {_between(base)}; quotient {times_text(ours, base)}", verdict


def _between(found: Border) -> str:
    met, missed = found
    if met and missed:
        return f"{met:.0%} to {missed:.0%}"
    return f"{met:.0%} and more" if met else f"less than {missed:.0%}" if missed else "not run"


def _p99(workload: str, runs: Sequence[Run]) -> tuple[str, str, str]:
    goal = f"best other's {WORKLOADS[workload].judged_by} p99 ≥ ours"
    return goal, *_at_loads(runs, lambda run, others: _best_other(run, others, judged_s))


def _p50(workload: str, runs: Sequence[Run]) -> tuple[str, str, str]:
    goal = "best other's TTFT p50 / ours"
    measured, _ = _at_loads(runs, lambda run, others: _best_other(run, others, lambda other: other["ttft_s"][0]))
    return goal, measured, "no goal"


def _best_other(run: Run, others: Sequence[Run], value: Callable[[Run], float | None]) -> tuple[str, bool] | None:
    ratios = [(found, other["policy"]) for other in others if (found := ratio(value(other), value(run))) is not None]
    if not ratios:
        return None
    best, policy = min(ratios)
    return f"{ratio_text(best)} ({policy}, of {len(others)})", best >= 1.0


def ratio_text(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if value < 10 else f"{value:,.0f}"


def _busy(workload: str, runs: Sequence[Run]) -> tuple[str, str, str]:
    def measured(run: Run, _: Sequence[Run]) -> tuple[str, bool]:
        return f"{run['busy_cv']:.3f}", run["busy_cv"] <= MOST_BUSY_CV

    goal = f"CV of busy time ≤ {MOST_BUSY_CV:g}"
    return goal, *_at_loads(runs, measured, [load for load in LOADS if load >= BUSY_LOAD])


def _at_loads(
    runs: Sequence[Run],
    measured: Callable[[Run, Sequence[Run]], tuple[str, bool] | None],
    loads: Sequence[float] = LOADS,
) -> tuple[str, str]:
    """What `measured` makes of ours and the others at each load, and the verdict over all of them."""
    texts: list[str] = []
    missed: list[float] = []
    unknown: list[float] = []
    for load in loads:
        at_load = [run for run in runs if run["load"] == load and not run["is_search"]]
        ours = next((run for run in at_load if run["policy"] == OURS), None)
        found = measured(ours, [run for run in at_load if run is not ours]) if ours else None
        if found is None:
            unknown.append(load)
            continue
        texts.append(f"{load:.0%}: {found[0]}")
        if not found[1]:
            missed.append(load)
    if not texts:
        return "-", "open"
    verdict = f"**misses** at {_loads(missed)}" if missed else "holds"
    return "; ".join(texts), verdict + (f"; open at {_loads(unknown)}" if unknown else "")


def _loads(loads: Sequence[float]) -> str:
    return ", ".join(f"{load:.0%}" for load in loads)

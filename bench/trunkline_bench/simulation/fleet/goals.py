"""The goals for the fleet, and whether the runs meet them."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from trunkline_bench.simulation.fleet.workloads import BASE, BESIDE, GOAL_S, OURS, WORKLOADS

Run = dict[str, Any]  # a run's figures, as sweep.py writes them
Border = tuple[float, float]  # highest load below all that missed the goal; lowest that missed it; 0: none

LOADS = (0.5, 0.8, 1.0)  # for which goals are set
LEAST_HITS = 0.95  # of what fits
MOST_BUSY_CV, BUSY_LOAD = 0.1, 0.8  # the bound holds from this load on
COLUMNS = ("measured, ours", "verdict")
Found = tuple[str, bool | None]  # what was measured, and whether the goal is met; None: unknown


def rows(runs: Sequence[Run]) -> dict[str, list[str]]:
    """Rows by goal, workload and fleet size. Only runs with one router and the first seed count."""
    runs = [run for run in runs if run["routers"] == 1 and run["seed"] == 0]
    fleets = sorted({(run["workload"], run["workers"]) for run in runs})
    found = {}
    for rows_of in (_hits, _highest_load, _p99, _p50, _busy):
        for workload, workers in fleets:
            among = [run for run in runs if (run["workload"], run["workers"]) == (workload, workers)]
            goal, measured, verdict = rows_of(workload, among)
            found[f"{goal}: {workload}, {workers} workers"] = [measured, verdict]
    return found


def judged_s(run: Run) -> float | None:
    """The p99 that the run's workload is judged by; None if no request got a first token."""
    ttft_s, delay_s = run["ttft_s"][2], run["delay_p99_s"]
    return None if ttft_s is None or delay_s is None else WORKLOADS[run["workload"]].judged_s(ttft_s, delay_s)


def ratio(value: float | None, base: float | None) -> float | None:
    """value / base; None if one is unknown, or if the base is not positive (a delay may be negative)."""
    return value / base if value is not None and base is not None and base > 0 else None


def border(runs: Sequence[Run], policy: str) -> Border:
    """The border of a policy for one workload and fleet, from runs at fixed loads and runs of a search."""
    mine = [run for run in runs if run["policy"] == policy]
    missed = min((run["load"] for run in mine if not run["meets_goal"]), default=0.0)
    met = [run["load"] for run in mine if run["meets_goal"] and (not missed or run["load"] < missed)]
    return max(met, default=0.0), missed


def times(one: Border, base: Border) -> Border:
    """Bounds of the ratio of two highest loads; 0 and infinity if unknown."""
    return (one[0] / base[1] if base[1] else 0.0), (one[1] / base[0] if one[1] and base[0] else math.inf)


def times_text(one: Border, base: Border) -> str:
    least, most = times(one, base)
    if least and most < math.inf:
        return f"{least:.2f} to {most:.2f}"
    if least:
        return f"{least:.2f} at least"
    return f"{most:.2f} at most" if most < math.inf else "-"


def _hits(workload: str, runs: Sequence[Run]) -> tuple[str, str, str]:
    def measured(run: Run, _: Sequence[Run]) -> Found:
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
    def value(run: Run) -> float | None:
        found = judged_s(run)
        # The figures of a run that was given up lack requests that had not begun; it missed the goal in any case.
        return max(found, GOAL_S) if found is not None and run["given_up"] else found

    goal = f"best other's {WORKLOADS[workload].judged_by} p99 ≥ ours"
    return goal, *_at_loads(runs, lambda run, others: _best_other(run, others, value))


def _p50(workload: str, runs: Sequence[Run]) -> tuple[str, str, str]:
    goal = "best other's TTFT p50 ≥ ours"
    return goal, *_at_loads(runs, lambda run, others: _best_other(run, others, lambda other: other["ttft_s"][0]))


def _best_other(run: Run, others: Sequence[Run], value: Callable[[Run], float | None]) -> Found | None:
    """The policy that is ahead of ours or nearest to it. The verdict is open until all of BESIDE have been run at this
    load; runs that were given up count."""
    ratios = [(found, other["policy"]) for other in others if (found := ratio(value(other), value(run))) is not None]
    if not ratios:
        return None
    best, policy = min(ratios)
    tried = {other["policy"] for other in others}
    missing = [name for name in BESIDE if name not in tried]
    without = f"; without {', '.join(missing)}" if missing else ""
    # Near 1 the verdict depends on one more digit.
    told = f"{best:.3f}" if best < 1.1 else ratio_text(best)
    return f"{told} ({policy}, of {len(tried)}{without})", False if best < 1.0 else None if missing else True


def ratio_text(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if value < 10 else f"{value:,.0f}"


def _busy(workload: str, runs: Sequence[Run]) -> tuple[str, str, str]:
    def measured(run: Run, _: Sequence[Run]) -> Found:
        return f"{run['busy_cv']:.3f}", run["busy_cv"] <= MOST_BUSY_CV

    goal = f"CV of busy time ≤ {MOST_BUSY_CV:g}"
    return goal, *_at_loads(runs, measured, [load for load in LOADS if load >= BUSY_LOAD])


def _at_loads(
    runs: Sequence[Run],
    measured: Callable[[Run, Sequence[Run]], Found | None],
    loads: Sequence[float] = LOADS,
) -> tuple[str, str]:
    """The texts of `measured` for our run and the others at each load, and the verdict over all loads."""
    texts: list[str] = []
    verdicts: dict[bool | None, list[float]] = {True: [], False: [], None: []}
    for load in loads:
        at_load = [run for run in runs if run["load"] == load]
        ours = next((run for run in at_load if run["policy"] == OURS and not run["is_search"]), None)
        found = measured(ours, [run for run in at_load if run["policy"] != OURS]) if ours else None
        if found is not None:
            texts.append(f"{load:.0%}: {found[0]}")
        verdicts[found[1] if found else None].append(load)
    missed, unknown = verdicts[False], verdicts[None]
    parts = [f"**misses** at {_loads(missed)}"] if missed else ["holds"] if verdicts[True] else []
    if unknown:
        parts.append(f"open at {_loads(unknown)}")
    return "; ".join(texts) or "-", "; ".join(parts) if texts else "open"


def _loads(loads: Sequence[float]) -> str:
    return ", ".join(f"{load:.0%}" for load in loads)

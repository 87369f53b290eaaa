"""The report of a sweep: tables and plots."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from trunkline_bench.reports.markdown import table
from trunkline_bench.simulation.fleet import goals, plots
from trunkline_bench.simulation.fleet.goals import Run
from trunkline_bench.simulation.fleet.summary import COLUMNS, OverTime, Summary, row
from trunkline_bench.simulation.fleet.workloads import BASE, GOAL_S, OURS, WORKLOADS

REPORT, RUNS = "fleet.md", "fleet.jsonl"
DRAWN_LOAD = 0.8
OF_OURS = 5  # number of columns before the ratios, which follow the times

METHOD = """\
The simulation runs in virtual time with the router's real index, policy and credits. Each worker is the real engine
loop on a simulated device with the profile h200-8b. Load comes from copies of the trace at other phases with prompts of
their own. 100 % is the capacity of workers that never wait for requests, have unlimited pools that never evict a
prefix, and run as many requests at once as the real pool holds at mean length. The ramp at the start is not counted.

- `ideal`: hits of an unlimited cache that all workers share, on the same requests.
- `what fits`: the same with the capacity of all pools and LRU eviction.
- `delay`: time to first token minus that of an idle worker with an empty cache; negative if caches save more time than
  the fleet adds.
- `/ ours`: the figure divided by that of Trunkline's policy at the same load; above 1 is worse than ours.
- `CV of prefill`: variation over workers of computed prompt tokens. Busy time says little if a worker always decodes.

`uncached-tokens` is Trunkline's first policy (tokens to compute, plus 16 for each running choice). `sglang-cache-aware`
is the SGLang gateway's cache_aware with its defaults, on the exact index.
"""

GOALS = """\
Computed from the runs below. Each goal is for 50, 80 and 100 % load on 8, 16 and 64 workers; the goal for the
coefficient of variation (CV) of busy time is for 80 % and more. `open` means that the necessary runs are missing.

- Hits should be 95 % of the ideal as far as capacity allows, that is, 95 % of what fits.
- No policy should beat ours at the 99th percentile or at the median: the figure of the best other policy, divided by
  ours, should be at least 1. The goal holds only if session affinity, round robin and SGLang's rule were all run. Runs
  that were given up count, with the missed goal as their p99 and with their median up to then.
- A highest load is known to lie between the highest load that met the goal and the lowest that missed it, so the ratio
  of two highest loads has bounds. The goal holds if the lower bound meets it, and misses if the upper bound does not.
"""


class NoRuns(Exception):
    """The folder has no figures of runs."""


def write(runs_folder: Path, output: Path, facts: str) -> None:
    """Writes fleet.md, fleet.jsonl and plots into `output`. Raises NoRuns."""
    runs = _read(runs_folder)
    output.mkdir(parents=True, exist_ok=True)
    took_s = sum(run["took_s"] for run in runs)
    parts = ["# Routing policies on a simulated fleet", "", facts.rstrip("\n")]
    parts += [f"- {len(runs)} runs, which took {took_s / 60:.0f} minutes", "", "## Goals", "", GOALS]
    parts += [table(goals.rows(runs), goals.COLUMNS, "goal"), "## Method", "", METHOD]
    parts += _capacities(runs_folder, output)
    parts += _highest(runs)
    for workload, workers in sorted({(run["workload"], run["workers"]) for run in runs if not run["is_search"]}):
        among = [r for r in runs if (r["workload"], r["workers"]) == (workload, workers) and not r["is_search"]]
        parts += [f"## {workload}, {workers} workers", ""]
        for load in sorted({run["load"] for run in among}):
            parts += _at_load(_ordered(run for run in among if run["load"] == load), output)
    (output / REPORT).write_text("\n".join(parts))
    lines = (json.dumps({name: value for name, value in run.items() if name != "over_time"}) for run in runs)
    (output / RUNS).write_text("\n".join(lines) + "\n")


def facts_of(output: Path) -> str | None:
    """The head of the existing report, which describes its runs; None if there is no report."""
    path = output / REPORT
    if not path.exists():
        return None
    lines = path.read_text().split("\n\n")[1].splitlines()
    return "\n".join(line for line in lines if not line.endswith("minutes"))


def _read(folder: Path) -> list[Run]:
    """The figures of single runs, from their files, or from a report's fleet.jsonl, which lacks figures over time."""
    paths = [path for path in sorted(folder.glob("*.json")) if "capacity" not in path.name]
    kept = folder / RUNS
    lines = [path.read_text() for path in paths] or (kept.read_text().splitlines() if kept.exists() else [])
    if not lines:
        raise NoRuns(f"{folder}: there are no figures of runs")
    return [{"seed": 0} | json.loads(line) for line in lines]  # early runs lack the seed


def _capacities(runs_folder: Path, output: Path) -> list[str]:
    """Lines about the capacities, whose files are copied beside the report, so that it can be written again."""
    parts = []
    for path in sorted(runs_folder.glob("capacity-*.json")):
        text = path.read_text()
        (output / path.name).write_text(text)
        found = json.loads(text)
        parts.append(
            f"{path.stem.removeprefix('capacity-')}: 100 % is {found['requests_per_s']:.3g} requests/s for each "
            f"worker, {found['copies_per_worker']:.3g} copies of the trace.\n"
        )
    return parts


def _at_load(runs: list[Run], output: Path) -> list[str]:
    """The table of all policies at one load, ours first, and a plot at DRAWN_LOAD."""
    first = runs[0]
    workload, workers = WORKLOADS[first["workload"]], first["workers"]
    corner = f"{first['load']:.0%}, {first['requests_per_s']:.4g} requests/s, {first['duration_s']:g} s"
    ours = next((run for run in runs if run["policy"] == OURS and (run["routers"], run["seed"]) == (1, 0)), None)
    rows = {}
    for run in runs:
        cells = row(_summary(run))
        rows[_name(run)] = cells[:OF_OURS] + _of_ours(run, ours) + cells[OF_OURS:]
    columns = (*COLUMNS[:OF_OURS], "TTFT p50 / ours", f"{workload.judged_by} p99 / ours", *COLUMNS[OF_OURS:])
    ideal = f"Ideal hit rate {first['ideal_hit_rate']:.1%}, with the fleet's capacity {first['fitting_hit_rate']:.1%}."
    parts = [ideal, "", table(rows, columns, corner)]
    if first["load"] == DRAWN_LOAD:
        picture = output / f"{workload.name}-{workers}.png"
        if all("over_time" in run for run in runs):
            plots.over_time([_summary(run) for run in runs], f"{workload.name}, {corner}", picture)
        if picture.exists():
            parts += [f"![over time]({picture.name})", ""]
    return parts


def _of_ours(run: Run, ours: Run | None) -> list[str]:
    """Cells with median and p99 as multiples of ours."""
    if ours is None:
        return ["-", "-"]
    p50 = goals.ratio(run["ttft_s"][0], ours["ttft_s"][0])
    return [goals.ratio_text(p50), goals.ratio_text(goals.ratio(goals.judged_s(run), goals.judged_s(ours)))]


def _highest(runs: Sequence[Run]) -> list[str]:
    """Tables of the highest load that met the goal, by policy, from searches and from runs at fixed loads."""
    parts = []
    for workload, workers in sorted({(run["workload"], run["workers"]) for run in runs}):
        among = _ordered(
            run
            for run in runs
            if (run["workload"], run["workers"], run["routers"], run["seed"]) == (workload, workers, 1, 0)
        )
        found = {policy: goals.border(among, policy) for policy in dict.fromkeys(run["policy"] for run in among)}
        base = found.get(BASE, (0.0, 0.0))
        rows = {
            policy: [
                f"{found_at[0]:.0%}" if found_at[0] else "-",
                f"{found_at[1]:.0%}" if found_at[1] else "-",
                "1" if policy == BASE else goals.times_text(found_at, base),
            ]
            for policy, found_at in found.items()
        }
        columns = ("highest load that met it", "lowest load that did not", "times round robin's")
        what = f"{WORKLOADS[workload].judged_by} p99 ≤ {GOAL_S:g} s"
        parts += [f"## Highest load with {what}: {workload}, {workers} workers", "", table(rows, columns)]
    return parts


def _ordered(runs: Iterable[Run]) -> list[Run]:
    """The runs with ours first, then by time to first token."""
    return sorted(runs, key=lambda run: (run["policy"] != OURS, run["ttft_s"][2] or 0.0))


def _name(run: Run) -> str:
    parts = [run["policy"]]
    if run["routers"] > 1:
        sync = f"credits every {run['credit_sync_ms']:g} ms" if run["credit_sync_ms"] else "no credits"
        parts += [f"{run['routers']} routers", sync]
    if run["seed"]:
        parts.append(f"seed {run['seed']}")
    return ", ".join(parts)


def _summary(run: Run) -> Summary:
    """The summary of a run from its written figures, which are rounded and may lack those over time."""
    with_gaps = ("over_time", "ttft_error")
    figures: dict[str, Any] = {field.name: run[field.name] for field in fields(Summary) if field.name not in with_gaps}
    kept = run.get("over_time", {field.name: [] for field in fields(OverTime)})
    over_time = OverTime(**{name: _with_nan(values) for name, values in kept.items()})
    p50, p90 = _with_nan(run.get("ttft_error", [None, None]))
    return Summary(**figures, over_time=over_time, ttft_error=(p50, p90))


def _with_nan(values: list[float | None]) -> list[float]:
    return [float("nan") if value is None else value for value in values]

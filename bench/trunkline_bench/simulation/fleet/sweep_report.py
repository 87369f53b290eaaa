"""The sweep's runs as tables and pictures."""

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
OF_OURS = 5  # ratios stand behind this many columns: after the times that they are made of

METHOD = """\
One virtual time, the router's real index, policy and credits, and for each worker the real engine loop before a device
that takes what the profile h200-8b says. Load is copies of the trace at other phases with prompts of their own; 100 %
is what workers could carry at best: one that never waits for requests, with an endless pool that never forgets a
prefix, and as many requests at once as the real pool holds of mean length. Load ramps up first, which is not counted.
`ideal`: hits of a cache without bounds that all workers share, on the same requests; `what fits`: the same with no more
room than all pools together, least recently used out first. `delay`: time to the first token less what an idle worker
with nothing cached would need, so it is negative where a cache saved more than the fleet cost. `/ ours`: that figure
over Trunkline's at the same load, so more than 1 is worse than ours. Busy time says little where something always
decodes: the variation over workers of computed prompt tokens stands beside it.

`uncached-tokens` is Trunkline's first policy (tokens to compute, and 16 for each running choice), `sglang-cache-aware`
is what the SGLang gateway's cache_aware does with its defaults, on the exact index.
"""

GOALS = """\
Made by code from the runs below. Asked for is each at 50, 80 and 100 % load on 8, 16 and 64 workers, the coefficient of
variation (CV) of busy time at 80 % and more; `open`: what would show it was not run. Hits should be 95 % of the ideal
where capacity allows, and what fits is what it allows. No policy should beat ours, at the 99th percentile or at the
median: given is the figure of the best of those others that were run there, over ours, which is to be 1 or more. It is
said to hold where session affinity, round robin and SGLang's rule were all run; a run that was given up counts, with a
p99 of the goal that it missed and the median until then. A highest load lies between the highest that met the goal and
the lowest that missed it, so the quotient of two has bounds: it holds where the lower one does, and misses where the
upper one does.
"""


class NoRuns(Exception):
    """The folder has no run's figures."""


def write(runs_folder: Path, output: Path, facts: str) -> None:
    """Writes fleet.md, fleet.jsonl and pictures into `output`. Raises NoRuns."""
    runs = _read(runs_folder)
    output.mkdir(parents=True, exist_ok=True)
    took_s = sum(run["took_s"] for run in runs)
    parts = ["# Policies before a simulated fleet", "", facts.rstrip("\n")]
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
    """Those at the head of the report that is there: date, machine, versions, command and code of its runs."""
    path = output / REPORT
    if not path.exists():
        return None
    lines = path.read_text().split("\n\n")[1].splitlines()
    return "\n".join(line for line in lines if not line.endswith("minutes"))


def _read(folder: Path) -> list[Run]:
    """The files of single runs, or what a report has kept of them: all but the course over time."""
    paths = [path for path in sorted(folder.glob("*.json")) if "capacity" not in path.name]
    kept = folder / RUNS
    lines = [path.read_text() for path in paths] or (kept.read_text().splitlines() if kept.exists() else [])
    if not lines:
        raise NoRuns(f"{folder}: no run's figures are there")
    return [{"seed": 0} | json.loads(line) for line in lines]  # the first runs had no other


def _capacities(runs_folder: Path, output: Path) -> list[str]:
    """What 100 % is; kept beside the report, so that it can be written again."""
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
    """Policies side by side, ours first."""
    first = runs[0]
    workload, workers = WORKLOADS[first["workload"]], first["workers"]
    corner = f"{first['load']:.0%}, {first['requests_per_s']:.4g} requests/s, {first['duration_s']:g} s"
    ours = next((run for run in runs if run["policy"] == OURS and (run["routers"], run["seed"]) == (1, 0)), None)
    rows = {}
    for run in runs:
        cells = row(_summary(run))
        rows[_name(run)] = cells[:OF_OURS] + _of_ours(run, ours) + cells[OF_OURS:]
    columns = (*COLUMNS[:OF_OURS], "TTFT p50 / ours", f"{workload.judged_by} p99 / ours", *COLUMNS[OF_OURS:])
    ideal = f"Ideal hit rate {first['ideal_hit_rate']:.1%}, with the fleet's room {first['fitting_hit_rate']:.1%}."
    parts = [ideal, "", table(rows, columns, corner)]
    if first["load"] == DRAWN_LOAD:
        picture = output / f"{workload.name}-{workers}.png"
        if all("over_time" in run for run in runs):
            plots.over_time([_summary(run) for run in runs], f"{workload.name}, {corner}", picture)
        if picture.exists():
            parts += [f"![over time]({picture.name})", ""]
    return parts


def _of_ours(run: Run, ours: Run | None) -> list[str]:
    """Median and p99, as multiples of ours."""
    if ours is None:
        return ["-", "-"]
    p50 = goals.ratio(run["ttft_s"][0], ours["ttft_s"][0])
    return [goals.ratio_text(p50), goals.ratio_text(goals.ratio(goals.judged_s(run), goals.judged_s(ours)))]


def _highest(runs: Sequence[Run]) -> list[str]:
    """The highest load that met the goal, by policy: those of a search, and what runs at fixed loads say."""
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
        columns = ("highest load tried that met it", "lowest that did not", "times round robin's")
        what = f"{WORKLOADS[workload].judged_by} p99 ≤ {GOAL_S:g} s"
        parts += [f"## Highest load with {what}: {workload}, {workers} workers", "", table(rows, columns)]
    return parts


def _ordered(runs: Iterable[Run]) -> list[Run]:
    """Ours first, then those with the shorter time to the first token."""
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
    """What was written of a run, as it was but for rounding; over time nothing, where that was not kept."""
    figures: dict[str, Any] = {field.name: run[field.name] for field in fields(Summary) if field.name != "over_time"}
    kept = run.get("over_time", {field.name: [] for field in fields(OverTime)})
    over_time = OverTime(**{name: [float("nan") if v is None else v for v in values] for name, values in kept.items()})
    return Summary(**figures, over_time=over_time)

"""The sweep's runs as tables and pictures."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from trunkline_bench.simulation import report
from trunkline_bench.simulation.fleet import plots
from trunkline_bench.simulation.fleet.summary import COLUMNS, OverTime, Summary, row

Run = dict[str, Any]

DRAWN_LOAD = 0.8

METHOD = """\
One virtual time, the router's real index, policy and credits, and for each worker the real engine loop before a device
that takes what the profile h200-8b says. Load is copies of the trace at other phases with prompts of their own; 100 %
is what workers could carry at best: one that never waits for requests, with an endless pool that never forgets a
prefix, and as many requests at once as the real pool holds of mean length. Load ramps up first, which is not counted.
`ideal`: hits of a cache without bounds that all workers share, on the same requests; `what fits`: the same with no more
room than all pools together, least recently used out first. `delay`: time to the first token less what an idle worker
with nothing cached would need, so it is negative where a cache saved more than the fleet cost. Busy
time says little where something always decodes: the variation over workers of computed prompt tokens stands beside it.

`uncached-tokens` is Trunkline's first policy (tokens to compute, and 16 for each running choice), `sglang-cache-aware`
is what the SGLang gateway's cache_aware does with its defaults, on the exact index.
"""


def write(runs_folder: Path, output: Path, facts: str) -> None:
    """Writes fleet.md, fleet.json and pictures into `output`."""
    runs: list[Run] = [
        json.loads(path.read_text()) for path in sorted(runs_folder.glob("*.json")) if "capacity" not in path.name
    ]
    output.mkdir(parents=True, exist_ok=True)
    took_s = sum(run["took_s"] for run in runs)
    facts += f"- {len(runs)} runs, which took {took_s / 60:.0f} minutes"
    parts = ["# Policies before a simulated fleet", "", facts, "", METHOD]
    for path in sorted(runs_folder.glob("capacity-*.json")):
        found = json.loads(path.read_text())
        parts.append(
            f"{path.stem.removeprefix('capacity-')}: 100 % is {found['requests_per_s']:.3g} requests/s for each "
            f"worker, {found['copies_per_worker']:.3g} copies of the trace.\n"
        )
    parts += _highest(runs)
    for workload, workers in sorted({(run["workload"], run["workers"]) for run in runs if not run["is_search"]}):
        among = [r for r in runs if (r["workload"], r["workers"]) == (workload, workers) and not r["is_search"]]
        parts += [f"## {workload}, {workers} workers", ""]
        for load in sorted({run["load"] for run in among}):
            at_load = _ordered(run for run in among if run["load"] == load)
            first = at_load[0]
            corner = f"{load:.0%}, {first['requests_per_s']:.4g} requests/s, {first['duration_s']:g} s"
            table = {_name(run): row(_summary(run)) for run in at_load}
            parts += [f"Ideal hit rate {first['ideal_hit_rate']:.1%}, with the fleet's room "
                      f"{first['fitting_hit_rate']:.1%}.", "", report.table(table, COLUMNS, corner)]  # fmt: skip
            if load == DRAWN_LOAD:
                name = f"{workload}-{workers}.png"
                plots.over_time([_summary(run) for run in at_load], f"{workload}, {corner}", output / name)
                parts += [f"![over time]({name})", ""]
    (output / "fleet.md").write_text("\n".join(parts))
    lines = (json.dumps({name: value for name, value in run.items() if name != "over_time"}) for run in runs)
    (output / "fleet.jsonl").write_text("\n".join(lines) + "\n")


def _highest(runs: list[Run]) -> list[str]:
    """The highest load that met the goal, by policy."""
    searched = [run for run in runs if run["is_search"]]
    parts = []
    for workload, workers in sorted({(run["workload"], run["workers"]) for run in searched}):
        # Runs at a fixed load count as well, where the policy was looked into.
        policies = dict.fromkeys(
            run["policy"] for run in _ordered(searched) if (run["workload"], run["workers"]) == (workload, workers)
        )
        found = {policy: _border(runs, workload, workers, policy) for policy in policies}
        base = found.get("round-robin", (0.0, 0.0))[0]
        what = "delay p99 ≤ 2 s" if workload == "mooncake" else "TTFT p99 ≤ 2 s"
        rows = {
            policy: [f"{low:.0%}" if low else "-", f"{high:.0%}" if high else "-", f"{low / base:.2f}" if base else "-"]
            for policy, (low, high) in found.items()
        }
        columns = ("highest load tried that met it", "lowest that did not", "times round robin's")
        parts += [f"## Highest load with {what}: {workload}, {workers} workers", "", report.table(rows, columns)]
    return parts


def _border(runs: list[Run], workload: str, workers: int, policy: str) -> tuple[float, float]:
    """(the highest load below all that missed the goal, the lowest that missed it, or 0)."""
    mine = [run for run in runs if (run["workload"], run["workers"], run["policy"]) == (workload, workers, policy)]
    missed = min((run["load"] for run in mine if not run["meets_goal"]), default=0.0)
    met = [run["load"] for run in mine if run["meets_goal"] and (not missed or run["load"] < missed)]
    return max(met, default=0.0), missed


def _ordered(runs: Iterable[Run]) -> list[Run]:
    """Ours first, then those with the shorter time to the first token."""
    return sorted(runs, key=lambda run: (run["policy"] != "predicted-ttft", run["ttft_s"][2] or 0.0))


def _name(run: Run) -> str:
    if run["routers"] == 1:
        return str(run["policy"])
    sync = f"credits every {run['credit_sync_ms']:g} ms" if run["credit_sync_ms"] else "no credits"
    return f"{run['policy']}, {run['routers']} routers, {sync}"


def _summary(run: Run) -> Summary:
    """What was written of a run, as it was but for rounding."""
    fields = {name: run[name] for name in Summary.__slots__ if name != "over_time"}
    over_time = OverTime(
        **{name: [float("nan") if v is None else v for v in values] for name, values in run["over_time"].items()}
    )
    return Summary(**fields, over_time=over_time)

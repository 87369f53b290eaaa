"""`make bench-fairness`: the effect of one tenant's flood on another tenant's requests.

Every flood runs in virtual time, alone and beside an innocent tenant that sends small requests one after another. The
innocent's time to first token is compared with its time on an idle worker.
"""

import argparse
import gc
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from trunkline_bench.reports.markdown import listed, table
from trunkline_bench.reports.provenance import commit, facts, make_command
from trunkline_bench.reports.statistics import percentile
from trunkline_bench.simulation.costs.device_profile import PROFILES
from trunkline_bench.simulation.costs.fitted_cost import FittedCost
from trunkline_bench.simulation.worker.neighbours import Neighbours, Observed, Tenant
from trunkline_bench.simulation.worker.simulated_worker import WorkerSpec
from trunkline_worker.scheduler.limits import SchedulerLimits

RESULTS = Path(__file__).parents[3] / "bench" / "results"
# The defaults of a worker's settings.
LIMITS = SchedulerLimits(itl_target_s=0.1, max_waiting_tokens=1 << 22)
# A small model on a CPU: 113 µs per token, 5 ns per pair of query and key.
CPU = FittedCost((0.005, 113e-6, 0.0, 0.0, 40e-9, 0.0, 0.0), (0.005, 113e-6, 0.0, 0.0, 40e-9, 0.0, 5e-9))
WORKERS = {
    "CPU, small model": WorkerSpec(CPU, 16_000, 16, LIMITS, run_ahead=0, host_s=0.0003),
    "H200, 8B model": WorkerSpec(PROFILES["h200-8b"], 20_000, 16, LIMITS, run_ahead=1, host_s=0.0005),
}
RUN_S = 15.0
# Before measurements begin, a worker learns the cost of its steps.
WARM_UP_S = 20.0
WARM_UP = [
    Tenant("short", 4, 200, 30, pause_s=0.3, ends_s=WARM_UP_S - 2),
    Tenant("long", 1, 3000, 10, pause_s=0.2, ends_s=WARM_UP_S - 2),
    Tenant("very long", 1, 30_000, 1, ends_s=1.0),
]


def flood(concurrency: int, prompt_tokens: int, output_tokens: int, **options: object) -> Tenant:
    """A tenant that keeps this many requests in flight from the end of the warm-up on."""
    return Tenant("flood", concurrency, prompt_tokens, output_tokens, starts_s=WARM_UP_S, **options)  # type: ignore[arg-type]


FLOODS: dict[str, list[Tenant]] = {
    "64 requests with n = 16, 900 tokens each": [flood(1024, 100, 900)],
    "128 prompts of 1,000 tokens at once": [flood(128, 1000, 8)],
    "8 prompts of 100,000 tokens": [flood(8, 100_000, 50)],
    "64 prompts of 20,000 tokens, more than the KV pool": [flood(64, 20_000, 400)],
    "256 prompts of 2,000 tokens, aborted after 0.7 s": [flood(256, 2000, 400, abort_after_s=0.7)],
    "256 prompts of 1,000 tokens, 400 tokens each": [flood(256, 1000, 400)],
    # Half a second before the innocent tenant, since each prompt that arrives in one step may take a whole step.
    "12 tenants, each with a prompt of 100,000 tokens": [
        Tenant(f"flood {n}", 1, 100_000, 50, starts_s=WARM_UP_S - 0.5) for n in range(12)
    ],
    "1,000 requests of one token": [flood(1000, 20, 1)],
    "128 requests with grammars, 400 tokens each, 15 of 16 forced": [flood(128, 100, 400, forced_tokens=15)],
    "200 prompts with one prefix of 4,000 tokens": [flood(200, 4000, 100, shares_prefix=True)],
}
INNOCENTS = {
    "1 token": Tenant("innocent", 1, 20, 1, pause_s=0.05, starts_s=WARM_UP_S),
    "500 in, 40 out": Tenant("innocent", 1, 500, 40, pause_s=0.05, starts_s=WARM_UP_S),
}
COLUMNS = ("TTFT p50 / p99, ms", "allowed, ms", "verdict", "flood, tokens/s", "flood alone, tokens/s", "preemptions")


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of a flood beside an innocent tenant."""

    p50_s: float  # the innocent's times to the first token
    p99_s: float
    bound_s: float  # upper bound of p99_s
    flood_tokens_s: float  # of prompts and outputs
    alone_tokens_s: float  # the same without the innocent tenant
    preemptions: int

    @property
    def holds(self) -> bool:
        return self.p99_s <= self.bound_s


def allowed_s(unloaded_s: float, itl_target_s: float) -> float:
    """Bound on the p99 of the time to first token of a tenant within its share. unloaded_s: p99 on an idle worker."""
    return max(4 * unloaded_s, unloaded_s + 2 * itl_target_s)


def observe(spec: WorkerSpec, tenants: Iterable[Tenant], run_s: float) -> Observed:
    """Runs the tenants for `run_s` seconds after the warm-up."""
    return Neighbours(spec, [*WARM_UP, *tenants]).run(WARM_UP_S + run_s)


def served_tokens(observed: Observed) -> int:
    """Prompt and output tokens of the flood's tenants."""
    return sum(seen.served_tokens for name, seen in observed.tenants.items() if name.startswith("flood"))


def measured(run_s: float) -> list[Figures]:
    """Figures for every worker, innocent tenant and flood, in the order of titles()."""
    figures = []
    for spec in WORKERS.values():
        alone = [served_tokens(observe(spec, flood, run_s)) for flood in FLOODS.values()]
        for innocent in INNOCENTS.values():
            unloaded = observe(spec, [innocent], run_s).tenants["innocent"].ttft_s
            bound_s = allowed_s(percentile(unloaded, 0.99), spec.limits.itl_target_s)
            for flood, alone_tokens in zip(FLOODS.values(), alone, strict=True):
                both = observe(spec, [*flood, innocent], run_s)
                times_s = both.tenants["innocent"].latest_s(both.duration_s)
                figures.append(
                    Figures(
                        percentile(times_s, 0.5),
                        percentile(times_s, 0.99),
                        bound_s,
                        served_tokens(both) / run_s,
                        alone_tokens / run_s,
                        both.preemptions,
                    )
                )
    return figures


def titles() -> list[tuple[str, str]]:
    """The heading and the flood for each entry of measured()."""
    return [
        (f"{worker}; the innocent's requests: {kind}", flood)
        for worker in WORKERS
        for kind in INNOCENTS
        for flood in FLOODS
    ]


def measured_before(checkout: Path, run_s: float) -> list[Figures]:
    """The figures of another checkout's worker, on this simulator."""
    here = Path(__file__).parents[2]
    path = os.pathsep.join(map(str, (checkout / "worker", checkout / "protos", here)))
    command = (sys.executable, "-m", __spec__.name, "--seconds", str(run_s), "--figures")
    told = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE, check=True)
    return [Figures(**row) for row in json.loads(told.stdout)]


def tables(after: list[Figures], before: list[Figures] | None) -> str:
    """The figures as Markdown tables. If there is an earlier version, its figures come first in each cell."""
    groups: dict[str, dict[str, list[str]]] = {}
    for index, (heading, flood) in enumerate(titles()):
        versions = [*([before[index]] if before else []), after[index]]
        rows = zip(*map(_cells, versions), strict=True)
        groups.setdefault(heading, {})[flood] = [
            cells[0] if len({*cells}) == 1 else " → ".join(cells) for cells in rows
        ]
    return "".join(f"\n## {heading}\n\n{table(rows, COLUMNS, 'flood')}" for heading, rows in groups.items())


def _cells(figures: Figures) -> list[str]:
    return [
        f"{figures.p50_s * 1e3:,.0f} / {figures.p99_s * 1e3:,.0f}",
        f"{figures.bound_s * 1e3:,.0f}",
        "holds" if figures.holds else "missed",
        f"{figures.flood_tokens_s:,.0f}",
        f"{figures.alone_tokens_s:,.0f}",
        f"{figures.preemptions:,}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=RUN_S, help="virtual time of each run")
    parser.add_argument("--before", type=Path, help="a checkout of another version, to compare its worker with")
    parser.add_argument("--figures", action="store_true", help="print the figures as JSON instead of writing a report")
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    gc.disable()  # see main.py
    if arguments.figures:
        print(json.dumps([asdict(row) for row in measured(arguments.seconds)]))
        return
    if arguments.before is not None and not (arguments.before / "worker").is_dir():
        parser.error(f"--before: {arguments.before} is not a checkout: it has no folder named worker")
    found = facts(make_command("bench-fairness", sys.argv[1:]), "virtual time")
    text = f"# One tenant's flood beside an innocent tenant\n\n{listed(found)}"
    text += f"- {arguments.seconds:g} s of virtual time for each run, after a warm-up of {WARM_UP_S:g} s\n"
    before = None
    if arguments.before is not None:
        before = measured_before(arguments.before, arguments.seconds)
        text += f"- before → after: commit {commit(arguments.before)} in the same runs, then this one\n"
    text += tables(measured(arguments.seconds), before)
    print(text)
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / f"fairness-{found['date']}.md").write_text(text)


if __name__ == "__main__":
    main()

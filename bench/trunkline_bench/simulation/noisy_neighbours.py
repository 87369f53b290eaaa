"""`python -m trunkline_bench.simulation.noisy_neighbours`: what one tenant's flood does to another tenant's requests.

Every flood is run in virtual time alone, and beside an innocent tenant that sends one small request after the other.
The innocent's time to the first token is held against what it is on an idle worker.
"""

import argparse
import gc
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from trunkline_bench.facts import facts, listed
from trunkline_bench.simulation import report
from trunkline_bench.simulation.device_profile import PROFILES
from trunkline_bench.simulation.fitted_cost import FittedCost
from trunkline_bench.simulation.neighbours import Neighbours, Observed, Tenant
from trunkline_bench.simulation.worker import WorkerSpec
from trunkline_worker.limits import SchedulerLimits

RESULTS = Path(__file__).parents[3] / "bench" / "results"
# The defaults of a worker's settings.
LIMITS = SchedulerLimits(itl_target_s=0.1, interactive_reserve=0.05, max_waiting_tokens=1 << 22)
# As a small model on a CPU: 113 µs for a token, 5 ns for a pair of a query and a key.
CPU = FittedCost((0.005, 113e-6, 0.0, 0.0, 40e-9, 0.0, 0.0), (0.005, 113e-6, 0.0, 0.0, 40e-9, 0.0, 5e-9))
WORKERS = {
    "CPU, small model": WorkerSpec(CPU, 16_000, 16, LIMITS, run_ahead=0, host_s=0.0003),
    "H200, 8B model": WorkerSpec(PROFILES["h200-8b"], 20_000, 16, LIMITS, run_ahead=1, host_s=0.0005),
}
RUN_S = 15.0
# Before anything is measured, a worker learns what its steps cost.
WARM_UP_S = 20.0
WARM_UP = [
    Tenant("short", 4, 200, 30, pause_s=0.3, ends_s=WARM_UP_S - 2),
    Tenant("long", 1, 3000, 10, pause_s=0.2, ends_s=WARM_UP_S - 2),
    Tenant("very long", 1, 30_000, 1, ends_s=1.0),
]


def flood(concurrency: int, prompt_tokens: int, output_tokens: int, **options: object) -> Tenant:
    """A tenant that keeps so many requests under way from the end of the warm-up on."""
    return Tenant("flood", concurrency, prompt_tokens, output_tokens, starts_s=WARM_UP_S, **options)  # type: ignore[arg-type]


FLOODS = {
    "64 requests with n = 16, 900 tokens each": flood(1024, 100, 900),
    "128 prompts of 1,000 tokens at once": flood(128, 1000, 8),
    "8 prompts of 100,000 tokens": flood(8, 100_000, 50),
    "64 prompts of 20,000 tokens, more than the KV pool": flood(64, 20_000, 400),
    "256 prompts of 2,000 tokens, aborted after 0.7 s": flood(256, 2000, 400, abort_after_s=0.7),
    "1,000 requests of one token": flood(1000, 20, 1),
    "200 prompts with one prefix of 4,000 tokens": flood(200, 4000, 100, shares_prefix=True),
}
INNOCENTS = {
    "1 token": Tenant("innocent", 1, 20, 1, pause_s=0.05, starts_s=WARM_UP_S),
    "500 in, 40 out": Tenant("innocent", 1, 500, 40, pause_s=0.05, starts_s=WARM_UP_S),
}
COLUMNS = (
    "TTFT p50 / p99, ms", "allowed, ms", "verdict", "flood beside it / alone, tokens/s in and out", "preemptions",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Verdict:
    """An innocent's times to the first token beside a flood, and what they may be."""

    p50_s: float
    p99_s: float
    bound_s: float

    @property
    def holds(self) -> bool:
        return self.p99_s <= self.bound_s


def allowed_s(unloaded_s: float, itl_target_s: float) -> float:
    """What the time to the first token of a tenant within its share may be at p99."""
    return max(4 * unloaded_s, unloaded_s + 2 * itl_target_s)


def observe(spec: WorkerSpec, tenants: Iterable[Tenant], run_s: float) -> Observed:
    """A run of so many seconds after the warm-up."""
    return Neighbours(spec, [*WARM_UP, *tenants]).run(WARM_UP_S + run_s)


def judge(spec: WorkerSpec, unloaded: Observed, beside: Observed) -> Verdict:
    """unloaded, beside: the innocent's run on an idle worker, and beside others"""
    unloaded_s = report.percentile(unloaded.tenants["innocent"].ttft_s, 0.99)
    times_s = beside.tenants["innocent"].latest_s(beside.duration_s)
    return Verdict(
        report.percentile(times_s, 0.5),
        report.percentile(times_s, 0.99),
        allowed_s(unloaded_s, spec.limits.itl_target_s),
    )


def tables(worker: str, spec: WorkerSpec, run_s: float) -> str:
    """All floods before one worker, a Markdown table for each kind of innocent."""
    alone = {title: observe(spec, [tenant], run_s) for title, tenant in FLOODS.items()}
    text = ""
    for kind, innocent in INNOCENTS.items():
        unloaded = observe(spec, [innocent], run_s)
        rows = {}
        for title, tenant in FLOODS.items():
            both = observe(spec, [tenant, innocent], run_s)
            verdict = judge(spec, unloaded, both)
            rows[title] = [
                f"{verdict.p50_s * 1e3:,.0f} / {verdict.p99_s * 1e3:,.0f}",
                f"{verdict.bound_s * 1e3:,.0f}",
                "holds" if verdict.holds else "missed",
                f"{both.tenants['flood'].served_tokens / run_s:,.0f} / "
                f"{alone[title].tenants['flood'].served_tokens / run_s:,.0f}",
                f"{both.preemptions:,}",
            ]
        text += f"### {worker}; the innocent's requests: {kind}\n\n{report.table(rows, COLUMNS, 'flood')}\n"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=RUN_S, help="of virtual time, of each run")
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    found = facts("python -m trunkline_bench.simulation.noisy_neighbours", "virtual time")
    gc.disable()  # see main.py
    text = f"# One tenant's flood beside an innocent tenant\n\n{listed(found)}"
    text += f"- {arguments.seconds:g} s of virtual time for each run, after a warm-up of {WARM_UP_S:g} s\n\n"
    for worker, spec in WORKERS.items():
        part = tables(worker, spec, arguments.seconds)
        print(part, flush=True)
        text += part
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / f"fairness-{found['date']}.md").write_text(text.rstrip("\n") + "\n")


if __name__ == "__main__":
    main()

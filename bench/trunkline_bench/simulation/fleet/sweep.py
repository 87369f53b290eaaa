"""`make bench-fleet`: compares policies at several loads, and finds the highest load that each one carries.

Every run is a process of its own and writes a file. Runs whose file exists are not repeated.
"""

import argparse
import gc
import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from trunkline_bench.reports.markdown import listed
from trunkline_bench.reports.provenance import facts, make_command
from trunkline_bench.simulation.costs.device_profile import PROFILES
from trunkline_bench.simulation.fleet.fleet import Fleet, TtftGoal, simulate
from trunkline_bench.simulation.fleet.main import copies_per_worker
from trunkline_bench.simulation.fleet.overlay import lap_of, overlay
from trunkline_bench.simulation.fleet.router import POLICIES
from trunkline_bench.simulation.fleet.summary import summary
from trunkline_bench.simulation.fleet.workloads import GOAL_S, WORKLOADS, Workload
from trunkline_bench.simulation.traces.trace_request import TraceRequest
from trunkline_bench.simulation.traces.workload import read_trace
from trunkline_bench.simulation.worker.simulated_worker import WorkerSpec
from trunkline_worker.scheduler.limits import SchedulerLimits

PROFILE = PROFILES["h200-8b"]
BETWEEN = (0.05, 1.6)  # range of the search for the highest load
SEARCH_STEPS = 5  # resolves a ratio of 1.11


@dataclass(frozen=True, slots=True)
class Point:
    """The parameters of one run."""

    workload: str
    workers: int
    policy: str
    load: float  # as a share of the fleet's capacity (capacity.py)
    duration_s: float
    is_search: bool = False  # given up as soon as the goal is missed
    routers: int = 1
    credit_sync_ms: float = 20.0
    seed: int = 0  # of the routers' draws; the workload is fixed

    @property
    def name(self) -> str:
        kind = "search" if self.is_search else "run"
        routers = f"-r{self.routers}-{self.credit_sync_ms:g}ms" if self.routers > 1 else ""
        seed = f"-seed{self.seed}" if self.seed else ""
        return (
            f"{self.workload}-{self.workers}-{self.policy}-{self.load:.3f}-{self.duration_s:g}s-{kind}{routers}{seed}"
        )


def run_point(point: Point, traces: Path, folder: Path) -> dict[str, Any]:
    """The figures of a run, read from its file or measured."""
    path = folder / f"{point.name}.json"
    if path.exists():
        found: dict[str, Any] = json.loads(path.read_text())
        return found
    gc.disable()
    started_s = time.perf_counter()
    workload = WORKLOADS[point.workload]
    limits = SchedulerLimits(
        max_step_tokens=4096, max_waiting_requests=1 << 20, max_waiting_tokens=1 << 60, itl_target_s=0.1
    )
    spec = WorkerSpec(PROFILE, PROFILE.kv_blocks(workload.block_size), workload.block_size, limits)
    trace = read_trace(traces / workload.file)
    copies = point.load * point.workers * _copies_per_worker(workload, spec, trace, folder)
    requests = overlay(trace, copies, workload.ramp_s + point.duration_s, workload.ramp_s)
    fleet = Fleet(
        point.workers,
        spec,
        point.policy,
        routers=point.routers,
        credit_sync_s=point.credit_sync_ms / 1e3 or None,
        seed=point.seed,
    )
    goal = TtftGoal(GOAL_S, idle_share=workload.idle_share) if point.is_search else None
    figures = summary(simulate(fleet, requests, from_s=workload.ramp_s, goal=goal))
    judged_s = workload.judged_s(figures.ttft_s[2], figures.delay_p99_s)
    result = asdict(point) | figures.to_json() | {
        "copies": copies,
        "meets_goal": not figures.given_up and judged_s <= GOAL_S,
        "took_s": round(time.perf_counter() - started_s, 1),
    }  # fmt: skip
    if point.is_search:
        del result["over_time"]
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result) + "\n")
    print(
        f"{point.name}: TTFT p99 {figures.ttft_s[2]:.3g} s, delay p99 {figures.delay_p99_s:.3g} s, hits "
        f"{figures.hit_rate:.3f} of {figures.ideal_hit_rate:.3f}{', given up' if figures.given_up else ''} "
        f"({result['took_s']} s)",
        file=sys.stderr,
        flush=True,
    )
    return result


def _copies_per_worker(workload: Workload, spec: WorkerSpec, trace: list[TraceRequest], folder: Path) -> float:
    """One worker's capacity as copies of the trace; kept in a file, since it is the same for every run."""
    path = folder / f"capacity-{workload.name}.json"
    if path.exists():
        return float(json.loads(path.read_text())["copies_per_worker"])
    copies = copies_per_worker(spec, trace)
    requests_per_s = copies * len(trace) / lap_of(trace)
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"copies_per_worker": copies, "requests_per_s": requests_per_s}) + "\n")
    return copies


def highest_load(
    point: Point,
    run: Callable[[Point], dict[str, Any]],
    between: tuple[float, float] = BETWEEN,
    steps: int = SEARCH_STEPS,
) -> float:
    """The highest load that met the goal, by bisection; 0 if none did."""
    low, high = between
    best = 0.0
    for _ in range(steps):
        # The geometric mean, since policies are compared by ratios.
        load = round((low * high) ** 0.5, 3)
        if run(replace(point, load=load, is_search=True))["meets_goal"]:
            low = best = load
        else:
            high = load
    return best


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--traces", type=Path, default=Path("../shared/traces"))
    parser.add_argument("--output", type=Path, default=Path("bench/results/fleet"))
    parser.add_argument("--runs", type=Path, default=Path(tempfile.gettempdir()) / "trunkline-fleet",
                        help="folder for the figures of single runs")  # fmt: skip
    parser.add_argument("--workers", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--loads", type=float, nargs="*", default=[0.5, 0.8, 1.0])
    parser.add_argument("--search", action="store_true", help="also the highest load that meets the goal")
    parser.add_argument("--between", type=float, nargs=2, default=BETWEEN, help="range of that search")
    parser.add_argument("--search-steps", type=int, default=SEARCH_STEPS)
    parser.add_argument("--duration-s", type=float, default=600.0)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="repeat the runs with these seeds; a search "
                        "uses the first")  # fmt: skip
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--report-only", action="store_true", help="run nothing; write the report from the files of "
                        "--runs, with the head of the existing report in --output")  # fmt: skip
    return parser.parse_args(argv)


def searches(arguments: argparse.Namespace) -> Iterable[Point]:
    for name in arguments.workloads:
        for workers in arguments.workers:
            for policy in arguments.policies:
                yield Point(name, workers, policy, 0.0, arguments.duration_s, seed=arguments.seeds[0])


def search(point: Point, traces: Path, folder: Path, between: tuple[float, float], steps: int) -> tuple[Point, float]:
    """Finds one policy's highest load."""
    return point, highest_load(point, lambda tried: run_point(tried, traces, folder), between, steps)


def run_all(arguments: argparse.Namespace) -> None:
    """Runs all points; each run writes its figures to the folder."""
    runs = arguments.runs
    points = [
        replace(point, load=load, seed=seed)
        for load in arguments.loads
        for seed in arguments.seeds
        for point in searches(arguments)
    ]
    with ProcessPoolExecutor(
        arguments.processes, mp_context=multiprocessing.get_context("spawn"), max_tasks_per_child=1
    ) as pool:
        running: list[Future[Any]] = [pool.submit(run_point, point, arguments.traces, runs) for point in points]
        if arguments.search:
            between = tuple(arguments.between)
            running += [
                pool.submit(search, point, arguments.traces, runs, between, arguments.search_steps)
                for point in searches(arguments)
            ]
        for done in running:
            done.result()


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    arguments = parse(argv)
    made = listed(facts(make_command("bench-fleet", argv), "not the simulated device"))
    if not arguments.report_only:
        run_all(arguments)
    from trunkline_bench.simulation.fleet import sweep_report  # only this needs matplotlib

    kept = sweep_report.facts_of(arguments.output) if arguments.report_only else None
    try:
        sweep_report.write(arguments.runs, arguments.output, kept or made)
    except sweep_report.NoRuns as error:
        print(f"bench-fleet: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

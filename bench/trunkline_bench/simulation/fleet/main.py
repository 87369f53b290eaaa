"""`trunkline bench simulate-fleet`: runs a trace through routers and workers in virtual time, and compares policies."""

import argparse
import gc
import json
import sys
import time
from pathlib import Path

from trunkline_bench.reports.markdown import table
from trunkline_bench.simulation.command import (
    ArgumentError,
    Parser,
    limits_of,
    not_written,
    number,
    prepare,
    refuse_too_many_blocks,
    requests_of,
    say_skipped,
)
from trunkline_bench.simulation.costs.device_profile import PROFILES
from trunkline_bench.simulation.fleet import capacity
from trunkline_bench.simulation.fleet.fleet import Fleet, simulate
from trunkline_bench.simulation.fleet.overlay import TooManyCopies, overlay
from trunkline_bench.simulation.fleet.router import POLICIES
from trunkline_bench.simulation.fleet.summary import COLUMNS, Summary, row, summary
from trunkline_bench.simulation.traces.trace_lines import SkippedLines, TraceError
from trunkline_bench.simulation.traces.trace_request import TraceRequest
from trunkline_bench.simulation.worker.simulated_worker import WorkerSpec
from trunkline_router.routing.route_request import PolicyName

MOST_WORKERS = 4096
MOST_ROUTERS = 64
MOST_TIME_S = 86_400.0


def make_parser() -> Parser:
    parser = Parser("trunkline bench simulate-fleet", __doc__)
    parser.add_argument("--workers", type=number(1, MOST_WORKERS), default=8)
    parser.add_argument("--policy", default=PolicyName.PREDICTED_TTFT.value, help="one or several, separated by "
                        "commas: " + ", ".join(POLICIES))  # fmt: skip
    parser.add_argument("--copies", type=number(0.01, 1e5), help="load as a multiple of the trace's own; copies are "
                        "overlaid at other phases, with prompts of their own")  # fmt: skip
    parser.add_argument("--load", type=number(0.01, 100.0), help="instead of --copies: load as a share of the highest "
                        "that the fleet could carry (1: all of it)")  # fmt: skip
    parser.add_argument("--duration-s", type=number(1.0, MOST_TIME_S), default=600.0)
    parser.add_argument("--ramp-s", type=number(0.0, MOST_TIME_S), default=60.0,
                        help="time in which load grows and caches fill; not counted")  # fmt: skip
    parser.add_argument("--routers", type=number(1, MOST_ROUTERS), default=1)
    parser.add_argument("--credit-sync-ms", type=number(0.0, 1e5), default=20.0,
                        help="interval at which routers exchange credits; 0: never")  # fmt: skip
    parser.add_argument("--network-ms", type=number(0.0, 1e4), default=2.0, help="one way, router to worker")
    parser.add_argument("--profile", default="h200-8b", choices=PROFILES, metavar="NAME",
                        help=f"time of steps: one of {', '.join(PROFILES)}")  # fmt: skip
    parser.add_worker_arguments()
    parser.add_argument("--seed", type=number(0, 1 << 32), default=0)
    parser.add_argument("--output", type=Path, help="folder for the plots and fleet.json; default: none are written")
    return parser


def main(argv: list[str] | None = None) -> int:
    command = make_parser()
    arguments = command.parse_args(argv)
    skipped = SkippedLines()
    try:
        policies = policies_of(arguments.policy)
        if arguments.output:
            prepare(arguments.output, "trunkline_bench.simulation.fleet.plots")
        spec = worker_of(arguments)
        requests = workload(arguments, spec, requests_of(arguments, skipped))
    except (ArgumentError, TraceError, TooManyCopies) as error:
        return command.fail(error)
    runs: list[Summary] = []
    for policy in policies:
        fleet = Fleet(
            arguments.workers,
            spec,
            policy,
            routers=arguments.routers,
            network_s=arguments.network_ms / 1e3,
            credit_sync_s=arguments.credit_sync_ms / 1e3 or None,
            seed=arguments.seed,
        )
        started_s = time.perf_counter()
        run = simulate(fleet, requests, from_s=arguments.ramp_s)
        runs.append(summary(run))
        steps = sum(worker.stats.steps for worker in run.workers)
        print(
            f"{policy}: {run.duration_s:,.1f} s of virtual time, {len(requests):,} requests, {steps:,} steps "
            f"in {time.perf_counter() - started_s:.1f} s",
            file=sys.stderr,
        )
    corner = f"{arguments.workers} x {arguments.profile}, {runs[0].requests_per_s:.4g} requests/s"
    print(table({figures.policy: row(figures) for figures in runs}, COLUMNS, corner))
    say_skipped(arguments, skipped)
    if arguments.output:
        try:
            write(arguments.output, runs, corner, skipped)
        except OSError as error:
            return command.fail(not_written(arguments.output, error))
    return 0


def policies_of(names: str) -> list[str]:
    """The named policies. Raises ArgumentError."""
    policies = list(dict.fromkeys(names.split(",")))
    for name in policies:
        if name not in POLICIES:
            raise ArgumentError(f"--policy {name!r}: allowed: {', '.join(POLICIES)}")
    return policies


def worker_of(arguments: argparse.Namespace) -> WorkerSpec:
    """The worker that the arguments describe. Raises ArgumentError."""
    profile = PROFILES[arguments.profile]
    num_blocks = profile.kv_blocks(arguments.block_size)
    refuse_too_many_blocks(arguments, num_blocks, arguments.workers)
    fast_forward = not arguments.no_fast_forward
    return WorkerSpec(
        profile, num_blocks, arguments.block_size, limits_of(arguments), fast_forward=fast_forward,
        routing=profile.model.spec.routing,
    )  # fmt: skip


def workload(arguments: argparse.Namespace, spec: WorkerSpec, trace: list[TraceRequest]) -> list[TraceRequest]:
    """The requests that the arguments describe. Raises ArgumentError or TooManyCopies."""
    if (arguments.copies is None) == (arguments.load is None):
        raise ArgumentError("one of --copies and --load is needed")
    copies = arguments.copies
    if copies is None:
        copies = arguments.load * arguments.workers * copies_per_worker(spec, trace)
    requests = overlay(trace, copies, arguments.ramp_s + arguments.duration_s, arguments.ramp_s)
    if not any(request.arrival_s >= arguments.ramp_s and spec.can_hold(request) for request in requests):
        raise ArgumentError(f"--copies {copies:.3g} --duration-s {arguments.duration_s:g}: no request that fits")
    return requests


def copies_per_worker(spec: WorkerSpec, trace: list[TraceRequest]) -> float:
    """One worker's capacity (capacity.py) as a multiple of the trace's own load. Raises ArgumentError."""
    copies = 1.0
    if len(trace) < capacity.SAMPLE_REQUESTS:
        copies = float(-(-capacity.SAMPLE_REQUESTS // len(trace)))
    sample = overlay(trace, copies, trace[-1].arrival_s + 1.0)
    if not any(map(spec.can_hold, sample)):
        raise ArgumentError("every request of the trace would be refused: none fits into a worker")
    trace_requests_per_s = len(trace) / max(trace[-1].arrival_s, 1.0)
    return capacity.requests_per_s(spec, sample) / trace_requests_per_s


def write(folder: Path, runs: list[Summary], title: str, skipped: SkippedLines) -> None:
    """Writes the figures of each run as JSON, with the number of skipped lines, and the plots."""
    from trunkline_bench.simulation.fleet import plots  # only this needs matplotlib

    figures = [run.to_json() | {"skipped_lines": skipped.count} for run in runs]
    (folder / "fleet.json").write_text(json.dumps(figures, indent=1) + "\n")
    plots.over_time(runs, title, folder / "over-time.png")


if __name__ == "__main__":
    # Millions of cache nodes have no cycles, but searching them for cycles would take a third of the time.
    gc.disable()
    sys.exit(main())

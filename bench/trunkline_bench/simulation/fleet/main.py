"""`trunkline bench simulate-fleet`: a trace through routers and workers in virtual time, policies side by side."""

import argparse
import gc
import json
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import NoReturn

from trunkline_bench.simulation import report
from trunkline_bench.simulation.device_profile import PROFILES
from trunkline_bench.simulation.fleet import capacity
from trunkline_bench.simulation.fleet.fleet import Fleet, simulate
from trunkline_bench.simulation.fleet.overlay import TooManyCopies, overlay
from trunkline_bench.simulation.fleet.router import POLICIES
from trunkline_bench.simulation.fleet.summary import COLUMNS, Summary, row, summary
from trunkline_bench.simulation.main import MOST_KV_BLOCKS, ArgumentError, number, setting
from trunkline_bench.simulation.replay import Worker
from trunkline_bench.simulation.traces import TraceError, TraceRequest, read_trace
from trunkline_router.routing_policy import PolicyName
from trunkline_worker.limits import SchedulerLimits

MOST_WORKERS = 4096
MOST_ROUTERS = 64
MOST_TIME_S = 86_400.0


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """In one line, without the usage."""
        self.exit(fail(message))


def parse(argv: list[str]) -> argparse.Namespace:
    parser = _Parser(
        prog="trunkline bench simulate-fleet",
        description=__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--trace", type=Path, required=True, help="Mooncake or text JSON lines, or Azure CSV")
    parser.add_argument("--workers", type=number(1, MOST_WORKERS), default=8)
    parser.add_argument("--policy", default=PolicyName.PREDICTED_TTFT.value, help="one of, or several separated by "
                        "commas: " + ", ".join(POLICIES))  # fmt: skip
    parser.add_argument("--copies", type=number(0.01, 1e5), help="how many times the trace's own load; copies are laid "
                        "over one another at other phases, with prompts of their own")  # fmt: skip
    parser.add_argument("--load", type=number(0.01, 100.0), help="instead of --copies: load as a share of what the "
                        "fleet could carry at best (1: all of it)")  # fmt: skip
    parser.add_argument("--duration-s", type=number(1.0, MOST_TIME_S), default=600.0)
    parser.add_argument("--ramp-s", type=number(0.0, MOST_TIME_S), default=60.0,
                        help="before that, load grows and caches fill; not counted")  # fmt: skip
    parser.add_argument("--routers", type=number(1, MOST_ROUTERS), default=1)
    parser.add_argument("--credit-sync-ms", type=number(0.0, 1e5), default=20.0,
                        help="routers tell one another what they have sent this often; 0: never")  # fmt: skip
    parser.add_argument("--network-ms", type=number(0.0, 1e4), default=2.0, help="one way, router to worker")
    parser.add_argument("--profile", default="h200-8b", choices=PROFILES, metavar="NAME",
                        help=f"what steps take: one of {', '.join(PROFILES)}")  # fmt: skip
    parser.add_argument("--block-size", type=setting("block_size"), default=64, help="tokens per KV block")
    parser.add_argument("--max-step-tokens", type=setting("max_step_tokens"), default=4096)
    parser.add_argument("--max-running-requests", type=setting("max_running_requests"), default=256)
    parser.add_argument("--max-waiting-requests", type=setting("max_waiting_requests"), default=1 << 20)
    parser.add_argument("--itl-target-ms", type=setting("itl_target_ms"), default=100.0)
    parser.add_argument("--seed", type=number(0, 1 << 32), default=0)
    parser.add_argument("--output", type=Path, help="folder for the plots and fleet.json; default: none are written")
    parser.add_argument(
        "--no-fast-forward", action="store_true", help="step through every step: the result is the same"
    )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    arguments = parse(sys.argv[1:] if argv is None else argv)
    try:
        policies = policies_of(arguments.policy)
        if arguments.output:
            prepare(arguments.output)
        spec = worker_of(arguments)
        requests = workload(arguments, spec, read_trace(arguments.trace))
    except (ArgumentError, TraceError, TooManyCopies) as error:
        return fail(str(error))
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
    print(report.table({figures.policy: row(figures) for figures in runs}, COLUMNS, corner))
    if arguments.output:
        try:
            write(arguments.output, runs, corner)
        except OSError as error:
            return fail(f"--output {arguments.output}: {error.strerror or error}")
    return 0


def fail(message: str) -> int:
    print(f"trunkline bench simulate-fleet: {message}", file=sys.stderr)
    return 2


def policies_of(names: str) -> list[str]:
    """Raises ArgumentError."""
    policies = list(dict.fromkeys(names.split(",")))
    for name in policies:
        if name not in POLICIES:
            raise ArgumentError(f"--policy {name!r}: allowed: {', '.join(POLICIES)}")
    return policies


def worker_of(arguments: argparse.Namespace) -> Worker:
    """Raises ArgumentError."""
    profile = PROFILES[arguments.profile]
    num_blocks = profile.kv_blocks(arguments.block_size)
    if num_blocks * arguments.workers > MOST_KV_BLOCKS:
        raise ArgumentError(
            f"--block-size {arguments.block_size}: {arguments.workers} pools of {arguments.profile} have "
            f"{num_blocks * arguments.workers:,} such blocks; allowed: up to {MOST_KV_BLOCKS:,}"
        )
    limits = SchedulerLimits(
        max_step_tokens=arguments.max_step_tokens,
        max_running_requests=arguments.max_running_requests,
        max_waiting_requests=arguments.max_waiting_requests,
        max_waiting_tokens=1 << 60,
        itl_target_s=arguments.itl_target_ms / 1e3,
    )
    return Worker(profile, num_blocks, arguments.block_size, limits, fast_forward=not arguments.no_fast_forward)


def workload(arguments: argparse.Namespace, spec: Worker, trace: list[TraceRequest]) -> list[TraceRequest]:
    """Raises ArgumentError or TooManyCopies."""
    if (arguments.copies is None) == (arguments.load is None):
        raise ArgumentError("one of --copies and --load is needed")
    copies = arguments.copies
    if copies is None:
        copies = arguments.load * arguments.workers * copies_per_worker(spec, trace)
    requests = overlay(trace, copies, arguments.ramp_s + arguments.duration_s, arguments.ramp_s)
    if not any(request.arrival_s >= arguments.ramp_s and spec.can_hold(request) for request in requests):
        raise ArgumentError(f"--copies {copies:.3g} --duration-s {arguments.duration_s:g}: no request that fits")
    return requests


def copies_per_worker(spec: Worker, trace: list[TraceRequest]) -> float:
    """How many times the trace's own load one worker could carry at best: see capacity.py. Raises ArgumentError."""
    copies = 1.0
    if len(trace) < capacity.SAMPLE_REQUESTS:
        copies = float(-(-capacity.SAMPLE_REQUESTS // len(trace)))
    sample = overlay(trace, copies, trace[-1].arrival_s + 1.0)
    if not any(map(spec.can_hold, sample)):
        raise ArgumentError("every request of the trace would be refused: none fits into a worker")
    trace_requests_per_s = len(trace) / max(trace[-1].arrival_s, 1.0)
    return capacity.requests_per_s(spec, sample) / trace_requests_per_s


def prepare(folder: Path) -> None:
    """Finds out, before the runs, whether pictures can be drawn and written. Raises ArgumentError."""
    try:
        import_module("trunkline_bench.simulation.fleet.plots")
    except ImportError as error:
        raise ArgumentError(f"--output needs matplotlib, of the extra trunkline[bench]: {error}") from None
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ArgumentError(f"--output {folder}: {error.strerror or error}") from None


def write(folder: Path, runs: list[Summary], title: str) -> None:
    """The figures as JSON, and the plots."""
    from trunkline_bench.simulation.fleet import plots  # matplotlib is wanted here only

    (folder / "fleet.json").write_text(json.dumps([figures.to_json() for figures in runs], indent=1) + "\n")
    plots.over_time(runs, title, folder / "over-time.png")


if __name__ == "__main__":
    # Millions of cache nodes and no cycles among them: looking for cycles would take a third of the time.
    gc.disable()
    sys.exit(main())

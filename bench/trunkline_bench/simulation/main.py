"""`trunkline bench simulate`: a trace through the engine in virtual time, on a device that is not there."""

import argparse
import gc
import sys
import time
from dataclasses import replace
from pathlib import Path

from trunkline_bench.simulation import report
from trunkline_bench.simulation.device_profile import PROFILES
from trunkline_bench.simulation.replay import Replayed, Worker, replay
from trunkline_bench.simulation.traces import TraceError, TraceRequest, at_once, at_rate, read_trace, window
from trunkline_worker.limits import AdmissionRule, Batching, SchedulerLimits


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="trunkline bench simulate", description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--trace", type=Path, required=True, help="Mooncake or text JSON lines, or Azure CSV")
    parser.add_argument("--profile", default="h200-8b", choices=sorted(PROFILES), metavar="NAME", help="device-model")
    parser.add_argument("--batching", default="continuous", help="one of, or several separated by commas: "
                        + ", ".join(kind.value for kind in Batching))  # fmt: skip
    parser.add_argument("--admission", default="predicted", choices=[rule.value for rule in AdmissionRule])
    parser.add_argument("--batch-size", type=at_least(1), default=64, help="of static and dynamic batching")
    parser.add_argument("--batch-window-ms", type=at_least(0.0), default=100.0, help="of dynamic batching")
    parser.add_argument("--rate", type=at_least(1e-6), help="requests per second, in the trace's rhythm")
    parser.add_argument("--at-once", action="store_true", help="all requests are there from the start")
    parser.add_argument("--limit", type=at_least(1), help="first requests of the trace only")
    parser.add_argument("--window-s", type=at_least(0.0), nargs=2, metavar=("FROM", "TO"), help="part of the trace")
    parser.add_argument("--block-size", type=at_least(1), default=64, help="tokens per KV block")
    parser.add_argument("--kv-blocks", type=at_least(1), help="default: what fits beside the weights")
    parser.add_argument("--max-step-tokens", type=at_least(1), default=4096)
    parser.add_argument("--max-running-requests", type=at_least(1), default=256)
    parser.add_argument("--max-waiting-requests", type=at_least(1), default=1 << 30, help="default: no bound")
    parser.add_argument("--itl-target-ms", type=at_least(0.0), default=100.0)
    parser.add_argument("--interactive-reserve", type=at_least(0.0), default=0.0)
    parser.add_argument("--output", type=Path, help="folder for the plots; default: none are drawn")
    parser.add_argument(
        "--no-fast-forward", action="store_true", help="step through every step: the result is the same"
    )
    return parser.parse_args(argv)


def at_least(least: float):  # type: ignore[no-untyped-def]
    """A type for argparse: a number of the kind of `least`, no smaller."""

    def convert(text: str) -> float:
        value = type(least)(text)
        if not value >= least:
            raise argparse.ArgumentTypeError(f"{text} is out of range; allowed: {least:g} or more")
        return value

    convert.__name__ = "number"
    return convert


def main(argv: list[str] | None = None) -> int:
    arguments = parse(sys.argv[1:] if argv is None else argv)
    try:
        kinds = [Batching(name) for name in arguments.batching.split(",")]
    except ValueError as error:
        return fail(f"--batching: {error}; allowed: {', '.join(kind.value for kind in Batching)}")
    try:
        requests = workload(arguments)
    except TraceError as error:
        return fail(str(error))
    if not requests:
        return fail(f"{arguments.trace}: no requests in this part of the trace")
    runs: dict[str, Replayed] = {}
    rows: dict[str, list[str]] = {}
    for kind in kinds:
        started_s = time.perf_counter()
        runs[kind.value] = run = replay(requests, worker(arguments, kind))
        rows[kind.value] = report.row(run)
        print(
            f"{kind.value}: {run.duration_s:,.1f} s of virtual time, {run.stats.steps.steps:,} steps "
            f"in {time.perf_counter() - started_s:.1f} s",
            file=sys.stderr,
        )
    print(report.table(rows, corner=f"{arguments.profile}, {len(requests):,} requests"))
    if arguments.output:
        try:
            draw(runs, arguments.output)
        except ImportError as error:
            return fail(f"--output needs matplotlib, of the extra trunkline[bench]: {error}")
    return 0


def fail(message: str) -> int:
    print(f"trunkline bench simulate: {message}", file=sys.stderr)
    return 2


def workload(arguments: argparse.Namespace) -> list[TraceRequest]:
    """The requests that the arguments ask for. Raises TraceError."""
    requests = read_trace(arguments.trace, limit=arguments.limit)
    if arguments.window_s:
        requests = window(requests, *arguments.window_s)
    if arguments.rate and requests:
        requests = at_rate(requests, arguments.rate)
    return at_once(requests) if arguments.at_once else requests


def worker(arguments: argparse.Namespace, kind: Batching) -> Worker:
    profile = PROFILES[arguments.profile]
    limits = SchedulerLimits(
        max_step_tokens=arguments.max_step_tokens,
        max_running_requests=arguments.max_running_requests,
        max_waiting_requests=arguments.max_waiting_requests,
        max_waiting_tokens=1 << 60,
        itl_target_s=arguments.itl_target_ms / 1e3,
        interactive_reserve=arguments.interactive_reserve,
        batching=kind,
        batch_size=arguments.batch_size,
        batch_window_s=arguments.batch_window_ms / 1e3,
        admission=AdmissionRule(arguments.admission),
    )
    if kind is not Batching.CONTINUOUS:
        limits = replace(limits, max_running_requests=max(arguments.batch_size, arguments.max_running_requests))
    num_blocks = arguments.kv_blocks or profile.kv_blocks(arguments.block_size)
    return Worker(profile, num_blocks, arguments.block_size, limits, fast_forward=not arguments.no_fast_forward)


def draw(runs: dict[str, Replayed], folder: Path) -> None:
    """All pictures of all runs."""
    from trunkline_bench.simulation import plots  # matplotlib is wanted here only

    folder.mkdir(parents=True, exist_ok=True)
    plots.ttft_cdf({name: report.ttfts(run) for name, run in runs.items()}, folder / "ttft-cdf.png")
    for name, run in runs.items():
        plots.kv_and_queue(run.series, folder / f"kv-and-queue-{name}.png")
        plots.batch_composition(run.series, folder / f"batch-composition-{name}.png")


if __name__ == "__main__":
    # Millions of cache nodes and no cycles among them: looking for cycles would take a third of the time.
    gc.disable()
    sys.exit(main())

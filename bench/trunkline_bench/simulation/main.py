"""`trunkline bench simulate`: a trace through the engine in virtual time, on a device that is not there."""

import argparse
import gc
import sys
import time
from dataclasses import replace
from pathlib import Path

from trunkline_bench.reports.markdown import table
from trunkline_bench.simulation import report
from trunkline_bench.simulation.command import (
    MOST_COUNT,
    MOST_KV_BLOCKS,
    ArgumentError,
    Parser,
    limits_of,
    not_written,
    number,
    prepare,
    refuse_too_many_blocks,
    requests_of,
    say_skipped,
    setting,
)
from trunkline_bench.simulation.costs.device_profile import PROFILES, Profile
from trunkline_bench.simulation.costs.fitted_cost import FittedCost, FittedCostError
from trunkline_bench.simulation.traces.trace_lines import SkippedLines, TraceError
from trunkline_bench.simulation.traces.trace_request import TraceRequest
from trunkline_bench.simulation.traces.workload import at_once, at_rate, window
from trunkline_bench.simulation.worker.replay import Replayed, replay
from trunkline_bench.simulation.worker.simulated_worker import WorkerSpec
from trunkline_worker.pace.limits import AdmissionRule, Batching

MOST_RATE = 1e9  # requests per second
MOST_TIME_S = 1e10
MOST_BATCH_WINDOW_MS = 24 * 3600 * 1e3


def make_parser() -> Parser:
    parser = Parser("trunkline bench simulate", __doc__)
    parser.add_argument("--profile", default="h200-8b", metavar="NAME_OR_FILE", help="what steps take: device-model, "
                        f"of {', '.join(PROFILES)}; or a JSON file fitted to measured steps, such as "
                        "trunkline_bench.simulation.calibration writes")  # fmt: skip
    parser.add_argument("--batching", default="continuous", help="one of, or several separated by commas: "
                        + ", ".join(kind.value for kind in Batching))  # fmt: skip
    parser.add_argument("--admission", default="predicted", choices=[rule.value for rule in AdmissionRule])
    parser.add_argument("--batch-size", type=setting("batch_size"), default=64, help="of static and dynamic batching")
    parser.add_argument("--batch-window-ms", type=setting("batch_window_ms", MOST_BATCH_WINDOW_MS), default=100.0,
                        help="of dynamic batching")  # fmt: skip
    parser.add_argument("--rate", type=number(1e-6, MOST_RATE), help="requests per second, in the trace's rhythm")
    parser.add_argument("--at-once", action="store_true", help="all requests are there from the start")
    parser.add_argument("--limit", type=number(1, MOST_COUNT), help="first requests of the trace only")
    parser.add_argument("--window-s", type=number(0.0, MOST_TIME_S), nargs=2, metavar=("FROM", "TO"),
                        help="part of the trace")  # fmt: skip
    parser.add_worker_arguments()
    parser.add_argument("--kv-blocks", type=setting("kv_blocks", MOST_KV_BLOCKS),
                        help="default: what fits beside the weights, or what was measured")  # fmt: skip
    parser.add_argument("--output", type=Path, help="folder for the plots; default: none are drawn")
    return parser


def main(argv: list[str] | None = None) -> int:
    command = make_parser()
    arguments = command.parse_args(argv)
    skipped = SkippedLines()
    try:
        workers = {kind: worker(arguments, kind) for kind in batchings(arguments.batching)}
        requests = workload(arguments, skipped)
        refuse_if_nothing_fits(arguments, next(iter(workers.values())), requests)
        if arguments.output:
            prepare(arguments.output, "trunkline_bench.simulation.plots")
    except (ArgumentError, TraceError) as error:
        return command.fail(error)
    runs: dict[str, Replayed] = {}
    rows: dict[str, list[str]] = {}
    for kind, simulated in workers.items():
        started_s = time.perf_counter()
        runs[kind.value] = run = replay(requests, simulated)
        rows |= report.rows(kind.value, run)
        print(
            f"{kind.value}: {run.duration_s:,.1f} s of virtual time, {run.stats.steps.steps:,} steps "
            f"in {time.perf_counter() - started_s:.1f} s",
            file=sys.stderr,
        )
    print(table(rows, report.COLUMNS, f"{arguments.profile}, {len(requests):,} requests"))
    say_skipped(arguments, skipped)
    if arguments.output:
        try:
            draw(runs, arguments.output)
        except OSError as error:
            return command.fail(not_written(arguments.output, error))
    return 0


def batchings(names: str) -> list[Batching]:
    """The kinds of batching that are named. Raises ArgumentError."""
    try:
        return [Batching(name) for name in names.split(",")]
    except ValueError as error:
        raise ArgumentError(f"--batching: {error}; allowed: {', '.join(kind.value for kind in Batching)}") from None


def cost_of(profile: str) -> Profile | FittedCost:
    """What steps take: by the name of a profile, or read from a file. Raises ArgumentError."""
    if profile in PROFILES:
        return PROFILES[profile]
    try:
        return FittedCost.from_json(Path(profile).read_text())
    except FileNotFoundError:
        raise ArgumentError(
            f"--profile: there is no file {profile}, and no profile of this name; allowed: {', '.join(PROFILES)}"
        ) from None
    except OSError as error:
        raise ArgumentError(f"--profile {profile}: {error.strerror or error}") from None
    except (UnicodeDecodeError, FittedCostError) as error:
        raise ArgumentError(f"--profile {profile}: {error}") from None


def workload(arguments: argparse.Namespace, skipped: SkippedLines) -> list[TraceRequest]:
    """The requests that the arguments ask for, one at least. Raises TraceError, ArgumentError."""
    requests = requests_of(arguments, skipped, arguments.limit)
    if arguments.window_s:
        start_s, end_s = arguments.window_s
        requests = window(requests, start_s, end_s)
        if not requests:
            raise ArgumentError(f"--window-s {start_s:g} {end_s:g}: {arguments.trace} has no requests in this part")
    if arguments.rate:
        requests = at_rate(requests, arguments.rate)
    return at_once(requests) if arguments.at_once else requests


def worker(arguments: argparse.Namespace, kind: Batching) -> WorkerSpec:
    """Raises ArgumentError."""
    cost = cost_of(arguments.profile)
    limits = replace(
        limits_of(arguments),
        batching=kind,
        batch_size=arguments.batch_size,
        batch_window_s=arguments.batch_window_ms / 1e3,
        admission=AdmissionRule(arguments.admission),
    )
    if kind is not Batching.CONTINUOUS:
        limits = replace(limits, max_running_requests=max(arguments.batch_size, arguments.max_running_requests))
    num_blocks = arguments.kv_blocks or cost.kv_blocks(arguments.block_size)
    if num_blocks is None:
        raise ArgumentError(f"--kv-blocks is needed: {arguments.profile} does not say what its KV pool held")
    refuse_too_many_blocks(arguments, num_blocks)
    return WorkerSpec(cost, num_blocks, arguments.block_size, limits, fast_forward=not arguments.no_fast_forward)


def refuse_if_nothing_fits(arguments: argparse.Namespace, simulated: WorkerSpec, requests: list[TraceRequest]) -> None:
    """Raises ArgumentError where the worker would refuse every request."""
    if any(map(simulated.can_hold, requests)):
        return
    most = simulated.max_total_tokens
    flag = f"--kv-blocks {simulated.num_blocks} of --block-size {simulated.block_size}"
    if most == simulated.context_length:
        flag = f"--trace {arguments.trace}"
    shortest = min(request.prompt_tokens for request in requests)
    raise ArgumentError(
        f"{flag}: every request would be refused; the shortest prompt has {shortest:,} tokens, and prompt and output "
        f"together may have {most:,}"
    )


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

"""`trunkline bench simulate`: runs a trace through the engine in virtual time, on a simulated device."""

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
from trunkline_worker.scheduler.limits import AdmissionRule, Batching

MOST_RATE = 1e9  # requests per second
MOST_TIME_S = 1e10
MOST_BATCH_WINDOW_MS = 24 * 3600 * 1e3


def make_parser() -> Parser:
    parser = Parser("trunkline bench simulate", __doc__)
    parser.add_argument("--profile", default="h200-8b", metavar="NAME_OR_FILE", help="time of steps: one of "
                        f"{', '.join(PROFILES)} (device-model); or a JSON file fitted to measured steps, as "
                        "trunkline_bench.simulation.calibration writes it")  # fmt: skip
    parser.add_argument("--batching", default="continuous", help="one or several, separated by commas: "
                        + ", ".join(kind.value for kind in Batching))  # fmt: skip
    parser.add_argument("--admission", default="predicted", choices=[rule.value for rule in AdmissionRule])
    parser.add_argument("--batch-size", type=setting("batch_size"), default=64, help="of static and dynamic batching")
    parser.add_argument("--batch-window-ms", type=setting("batch_window_ms", MOST_BATCH_WINDOW_MS), default=100.0,
                        help="of dynamic batching")  # fmt: skip
    parser.add_argument(
        "--rate", type=number(1e-6, MOST_RATE), help="requests per second; scales all gaps of the trace"
    )
    parser.add_argument("--at-once", action="store_true", help="all requests arrive at the start")
    parser.add_argument("--limit", type=number(1, MOST_COUNT), help="only the first requests of the trace")
    parser.add_argument("--window-s", type=number(0.0, MOST_TIME_S), nargs=2, metavar=("FROM", "TO"),
                        help="only this part of the trace")  # fmt: skip
    parser.add_worker_arguments()
    parser.add_argument("--kv-blocks", type=setting("kv_blocks", MOST_KV_BLOCKS),
                        help="default: what fits beside the weights, or the measured size")  # fmt: skip
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
    """The named kinds of batching. Raises ArgumentError."""
    try:
        return [Batching(name) for name in names.split(",")]
    except ValueError as error:
        raise ArgumentError(f"--batching: {error}; allowed: {', '.join(kind.value for kind in Batching)}") from None


def cost_of(profile: str) -> Profile | FittedCost:
    """The cost model with this name, or from this file. Raises ArgumentError."""
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
    """The requests that the arguments select, at least one. Raises TraceError and ArgumentError."""
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
    """The worker that the arguments describe, with this kind of batching. Raises ArgumentError."""
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
        raise ArgumentError(f"--kv-blocks is needed: {arguments.profile} does not say how large its KV pool was")
    refuse_too_many_blocks(arguments, num_blocks)
    return WorkerSpec(
        cost, num_blocks, arguments.block_size, limits, fast_forward=not arguments.no_fast_forward,
        routing=cost.model.spec.routing if isinstance(cost, Profile) else None,
    )  # fmt: skip


def refuse_if_nothing_fits(arguments: argparse.Namespace, simulated: WorkerSpec, requests: list[TraceRequest]) -> None:
    """Raises ArgumentError if the worker would refuse every request."""
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
    """Writes the plots of all runs."""
    from trunkline_bench.simulation import plots  # only this needs matplotlib

    folder.mkdir(parents=True, exist_ok=True)
    plots.ttft_cdf({name: report.ttfts(run) for name, run in runs.items()}, folder / "ttft-cdf.png")
    for name, run in runs.items():
        plots.kv_and_queue(run.series, folder / f"kv-and-queue-{name}.png")
        plots.batch_composition(run.series, folder / f"batch-composition-{name}.png")


if __name__ == "__main__":
    # Millions of cache nodes have no cycles, but searching them for cycles would take a third of the time.
    gc.disable()
    sys.exit(main())

"""`trunkline bench simulate`: a trace through the engine in virtual time, on a device that is not there."""

import argparse
import gc
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import fields, replace
from importlib import import_module
from pathlib import Path
from typing import NoReturn

from trunkline_bench.simulation import report
from trunkline_bench.simulation.device_profile import PROFILES, Profile
from trunkline_bench.simulation.fitted_cost import FittedCost, FittedCostError
from trunkline_bench.simulation.replay import Replayed, Worker, replay
from trunkline_bench.simulation.traces import TraceError, TraceRequest, at_once, at_rate, read_trace, window
from trunkline_worker.limits import AdmissionRule, Batching, SchedulerLimits
from trunkline_worker.settings import EngineSettings

WORKER_BOUNDS = {setting.name: setting.metadata for setting in fields(EngineSettings)}
MOST_COUNT = 10**12
MOST_KV_BLOCKS = 10**7  # the simulator's own lists of so many take 700 MB
MOST_RATE = 1e9  # requests per second
MOST_TIME_S = 1e10
MOST_BATCH_WINDOW_MS = 24 * 3600 * 1e3


class ArgumentError(Exception):
    """An argument makes no sense. One line: the flag, and what is wrong."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """In one line, without the usage."""
        self.exit(fail(message))


def parse(argv: list[str]) -> argparse.Namespace:
    parser = _Parser(
        prog="trunkline bench simulate", description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--trace", type=Path, required=True, help="Mooncake or text JSON lines, or Azure CSV")
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
    parser.add_argument("--block-size", type=setting("block_size"), default=64, help="tokens per KV block")
    parser.add_argument("--kv-blocks", type=setting("kv_blocks", MOST_KV_BLOCKS),
                        help="default: what fits beside the weights, or what was measured")  # fmt: skip
    parser.add_argument("--max-step-tokens", type=setting("max_step_tokens"), default=4096)
    parser.add_argument("--max-running-requests", type=setting("max_running_requests"), default=256)
    parser.add_argument("--max-waiting-requests", type=setting("max_waiting_requests"), default=1 << 30,
                        help="default: no bound")  # fmt: skip
    parser.add_argument("--itl-target-ms", type=setting("itl_target_ms"), default=100.0)
    parser.add_argument("--interactive-reserve", type=setting("interactive_reserve"), default=0.0)
    parser.add_argument("--output", type=Path, help="folder for the plots; default: none are drawn")
    parser.add_argument(
        "--no-fast-forward", action="store_true", help="step through every step: the result is the same"
    )
    return parser.parse_args(argv)


def number(least: float, most: float) -> Callable[[str], float]:
    """A type for argparse: a number of the kind of `least`, within the bounds."""

    def convert(text: str) -> float:
        value = type(least)(text)
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text} is out of range; allowed: {least:g} to {most:g}")
        return value

    convert.__name__ = "number"
    return convert


def setting(name: str, most: float = MOST_COUNT) -> Callable[[str], float]:
    """A type for argparse: a number within the bounds that a worker's setting has; `most` where it has no upper one."""
    bounds = WORKER_BOUNDS[name]
    return number(bounds["minimum"], bounds.get("maximum", most))


def main(argv: list[str] | None = None) -> int:
    arguments = parse(sys.argv[1:] if argv is None else argv)
    try:
        workers = {kind: worker(arguments, kind) for kind in batchings(arguments.batching)}
        requests = workload(arguments)
        refuse_if_nothing_fits(arguments, next(iter(workers.values())), requests)
        if arguments.output:
            prepare(arguments.output)
    except (ArgumentError, TraceError) as error:
        return fail(str(error))
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
    print(report.table(rows, corner=f"{arguments.profile}, {len(requests):,} requests"))
    if arguments.output:
        try:
            draw(runs, arguments.output)
        except OSError as error:
            return fail(f"--output {arguments.output}: {error.strerror or error}")
    return 0


def fail(message: str) -> int:
    print(f"trunkline bench simulate: {message}", file=sys.stderr)
    return 2


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


def workload(arguments: argparse.Namespace) -> list[TraceRequest]:
    """The requests that the arguments ask for, one at least. Raises TraceError, ArgumentError."""
    requests = read_trace(arguments.trace, limit=arguments.limit)
    if arguments.window_s:
        start_s, end_s = arguments.window_s
        requests = window(requests, start_s, end_s)
        if not requests:
            raise ArgumentError(f"--window-s {start_s:g} {end_s:g}: {arguments.trace} has no requests in this part")
    if arguments.rate:
        requests = at_rate(requests, arguments.rate)
    return at_once(requests) if arguments.at_once else requests


def worker(arguments: argparse.Namespace, kind: Batching) -> Worker:
    """Raises ArgumentError."""
    cost = cost_of(arguments.profile)
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
    num_blocks = arguments.kv_blocks or cost.kv_blocks(arguments.block_size)
    if num_blocks is None:
        raise ArgumentError(f"--kv-blocks is needed: {arguments.profile} does not say what its KV pool held")
    if num_blocks > MOST_KV_BLOCKS:
        raise ArgumentError(
            f"--block-size {arguments.block_size}: the KV pool of {arguments.profile} has {num_blocks:,} such blocks; "
            f"allowed: up to {MOST_KV_BLOCKS:,}"
        )
    return Worker(cost, num_blocks, arguments.block_size, limits, fast_forward=not arguments.no_fast_forward)


def refuse_if_nothing_fits(arguments: argparse.Namespace, simulated: Worker, requests: list[TraceRequest]) -> None:
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


def prepare(folder: Path) -> None:
    """Finds out, before the runs, whether pictures can be drawn and written. Raises ArgumentError."""
    try:
        import_module("trunkline_bench.simulation.plots")
    except ImportError as error:
        raise ArgumentError(f"--output needs matplotlib, of the extra trunkline[bench]: {error}") from None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ArgumentError(f"--output {folder}: {error.strerror or error}") from None


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

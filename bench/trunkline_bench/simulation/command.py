"""What the simulator's two commands share: arguments for workers, and error messages of one line."""

import argparse
import sys
import tempfile
from collections.abc import Callable
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import NoReturn

from trunkline_bench.simulation.traces.trace_lines import InvalidLineError, SkippedLines
from trunkline_bench.simulation.traces.trace_request import TraceRequest
from trunkline_bench.simulation.traces.workload import read_trace
from trunkline_worker.scheduler.limits import SchedulerLimits
from trunkline_worker.settings import EngineSettings

WORKER_BOUNDS = {setting.name: setting.metadata for setting in fields(EngineSettings)}
MOST_COUNT = 10**12
MOST_KV_BLOCKS = 10**7  # for so many, the simulator's lists take 700 MB


class ArgumentError(Exception):
    """An argument is invalid. The message is one line with the flag and the problem."""


class Parser(argparse.ArgumentParser):
    """A parser for commands that take a trace and simulate workers."""

    def __init__(self, prog: str, description: str | None) -> None:
        super().__init__(prog=prog, description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
        self.add_argument("--trace", type=Path, required=True, help="Mooncake or text JSON lines, or Azure CSV")
        self.add_argument(
            "--skip-invalid", action="store_true",
            help="skip lines of the trace that are not requests, and report how many; otherwise they are errors",
        )  # fmt: skip

    def error(self, message: str) -> NoReturn:
        """Exits with a message of one line, without the usage."""
        self.exit(self.fail(message))

    def fail(self, message: object) -> int:
        """Prints the message. Returns the command's exit status."""
        print(f"{self.prog}: {message}", file=sys.stderr)
        return 2

    def add_worker_arguments(self) -> None:
        """Adds the arguments that limits_of() reads, --block-size and --no-fast-forward."""
        self.add_argument("--block-size", type=setting("block_size"), default=64, help="tokens per KV block")
        self.add_argument("--max-step-tokens", type=setting("max_step_tokens"), default=4096)
        self.add_argument("--max-running-requests", type=setting("max_running_requests"), default=256)
        self.add_argument("--max-waiting-requests", type=setting("max_waiting_requests"), default=1 << 30,
                          help="default: no bound")  # fmt: skip
        self.add_argument("--itl-target-ms", type=setting("itl_target_ms"), default=100.0)
        self.add_argument("--interactive-reserve", type=setting("interactive_reserve"), default=0.0)
        self.add_argument(
            "--no-fast-forward", action="store_true", help="simulate every step separately; the result is the same"
        )


def requests_of(arguments: argparse.Namespace, skipped: SkippedLines, limit: int | None = None) -> list[TraceRequest]:
    """The first `limit` requests of the trace. With --skip-invalid, invalid lines are counted in `skipped`.

    Raises TraceError, and ArgumentError if --skip-invalid would help."""
    if arguments.skip_invalid:
        return read_trace(arguments.trace, limit=limit, skipped=skipped)
    try:
        return read_trace(arguments.trace, limit=limit)
    except InvalidLineError as error:
        raise ArgumentError(f"{error}; --skip-invalid leaves such lines out") from None


def say_skipped(arguments: argparse.Namespace, skipped: SkippedLines) -> None:
    """Prints the skipped lines of the trace, if any."""
    if skipped.count:
        print(f"{arguments.trace}: {skipped}")


def number(least: float, most: float) -> Callable[[str], float]:
    """An argparse type: a number of the type of `least`, within the bounds."""

    def convert(text: str) -> float:
        value = type(least)(text)
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text.strip()} is out of range; allowed: {least:g} to {most:g}")
        return value

    convert.__name__ = "number"
    return convert


def setting(name: str, most: float = MOST_COUNT) -> Callable[[str], float]:
    """An argparse type: a number within the bounds of a worker's setting; `most` if the setting has no upper bound."""
    bounds = WORKER_BOUNDS[name]
    return number(bounds["minimum"], bounds.get("maximum", most))


def limits_of(arguments: argparse.Namespace) -> SchedulerLimits:
    return SchedulerLimits(
        max_step_tokens=arguments.max_step_tokens,
        max_running_requests=arguments.max_running_requests,
        max_waiting_requests=arguments.max_waiting_requests,
        max_waiting_tokens=1 << 60,
        itl_target_s=arguments.itl_target_ms / 1e3,
        interactive_reserve=arguments.interactive_reserve,
    )


def refuse_too_many_blocks(arguments: argparse.Namespace, num_blocks: int, workers: int = 1) -> None:
    """Raises ArgumentError if the workers' pools together have more blocks than can be simulated."""
    if num_blocks * workers > MOST_KV_BLOCKS:
        profile = arguments.profile
        pools = f"the KV pool of {profile} has" if workers == 1 else f"{workers} pools of {profile} have"
        raise ArgumentError(
            f"--block-size {arguments.block_size}: {pools} {num_blocks * workers:,} such blocks; "
            f"allowed: up to {MOST_KV_BLOCKS:,}"
        )


def prepare(folder: Path, plots: str) -> None:
    """Checks before the runs that a module's plots can be drawn and written. Raises ArgumentError."""
    try:
        import_module(plots)
    except ImportError as error:
        raise ArgumentError(f"--output needs matplotlib, of the extra trunkline[bench]: {error}") from None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ArgumentError(not_written(folder, error)) from None


def not_written(folder: Path, error: OSError) -> str:
    return f"--output {folder}: {error.strerror or error}"

"""`make bench-gpu`: checks and measures the device code on one GPU, in stages that are processes of their own.

usage: python -m trunkline_bench.gpu.main [--call 1] [--only stage,…] [--output bench/results/gpu] [--tiny MODEL]

Every row is written to the output file as soon as it is measured. If a device error ends a stage, the stage runs again
with CUDA_LAUNCH_BLOCKING=1, and under compute-sanitizer if that is installed, to find the kernel. --tiny MODEL tries
all of this on a CPU, with tiny shapes and interpreted kernels.
"""

import argparse
import os
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from trunkline_bench.gpu.results_file import ResultsFile
from trunkline_bench.gpu.stage_process import Ending, Row, run_stage
from trunkline_bench.gpu.stages import CALL_S, STAGES, Stage

RESULTS = Path(__file__).parents[2] / "results" / "gpu"
SANITIZER = "compute-sanitizer"
LEAST_S = 20.0  # a stage begins only if this much time is left
# The limits of stages are for a GPU. With --tiny, kernels are interpreted on processors that may do other work.
TINY_LIMITS = 10.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    calls = sorted({stage.call for stage in STAGES})
    parser.add_argument("--call", type=int, choices=calls, help="run the stages of one planned call; default: all")
    parser.add_argument("--only", default="", metavar="STAGE,…", help="any of " + ", ".join(s.name for s in STAGES))
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--minutes", type=float, default=CALL_S / 60, help="time limit of the whole run")
    parser.add_argument("--tiny", type=Path, metavar="MODEL")
    arguments = parser.parse_args()
    names = [name.strip() for name in arguments.only.split(",") if name.strip()]
    known = {stage.name for stage in STAGES}
    if unknown := [name for name in names if name not in known]:
        sys.exit(f"there is no stage {unknown[0]!r}; the stages are: {', '.join(stage.name for stage in STAGES)}")
    stages = [stage for stage in STAGES if arguments.call in (None, stage.call) and (not names or stage.name in names)]
    # So that the processes of a stage end with this one.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    arguments.output.mkdir(parents=True, exist_ok=True)
    sys.exit(not run(stages, arguments.output, tiny=arguments.tiny, seconds=arguments.minutes * 60))


def run(stages: Sequence[Stage], output: Path, *, tiny: Path | None, seconds: float) -> bool:
    """Runs stages one after another. Returns whether all of them succeeded. Exits with a message if there is no GPU."""
    until_s = time.monotonic() + seconds
    results = ResultsFile(output / f"{datetime.now(UTC):%Y-%m-%d}.json", "make bench-gpu")
    failed: set[str] = set()
    for stage in stages:
        if stage.instead_of and stage.instead_of not in failed:
            continue
        left_s = until_s - time.monotonic()
        if left_s < LEAST_S:
            results.note(stage.name, ended=f"not started: {seconds / 60:g} minutes were over")
            failed.add(stage.name)
            continue
        limit_s = stage.limit_s * (TINY_LIMITS if tiny else 1.0)
        ending = _run(stage, output, results, tiny, min(limit_s, left_s))
        if not ending.has_gpu:
            sys.exit("no GPU that torch can use: nothing is measured (--tiny MODEL tries the stages on a CPU)")
        if ending.error:
            failed.add(stage.name)
            if ending.is_of_device:
                _look_closer(stage, output, results, tiny, until_s)
    return not failed


def _arguments(output: Path, tiny: Path | None) -> list[str]:
    return [f"--output={output}", *([f"--tiny={tiny}"] if tiny else [])]


def _run(stage: Stage, output: Path, results: ResultsFile, tiny: Path | None, limit_s: float) -> Ending:
    print(f"{stage.name} …", flush=True)
    results.begin(stage.name)

    def take(row: Row) -> None:
        results.add(stage.name, row)
        print("  " + "  ".join(f"{key}={_shown(value)}" for key, value in row.items()), flush=True)

    ending = run_stage(stage, _arguments(output, tiny), _log(output, stage, ""), limit_s=limit_s, on_row=take)
    results.end(stage.name, ending)
    print(f"  {ending.error or 'done'} after {ending.seconds:.0f} s {ending.kernel}".rstrip(), flush=True)
    return ending


def _look_closer(stage: Stage, output: Path, results: ResultsFile, tiny: Path | None, until_s: float) -> None:
    """Runs a stage again that a device error ended, to find the kernel. Drops the rows, whose times mean nothing."""
    ways: list[tuple[str, list[str]]] = [("with launches that wait", [])]
    if sanitizer := shutil.which(SANITIZER):
        ways.append((f"under {SANITIZER}", [sanitizer]))
    for way, under in ways:
        left_s = min(stage.limit_s, until_s - time.monotonic())
        if left_s < LEAST_S:
            return
        print(f"{stage.name}, again {way} …", flush=True)
        again = run_stage(
            stage, _arguments(output, tiny), _log(output, stage, "-again"), limit_s=left_s, on_row=lambda row: None,
            environment={**os.environ, "CUDA_LAUNCH_BLOCKING": "1"}, under=under,
        )  # fmt: skip
        results.note(stage.name, **{f"again {way}": again.error or "done", f"kernel {way}": again.kernel})
        print(f"  {again.error or 'done'} {again.kernel}".rstrip(), flush=True)


def _log(output: Path, stage: Stage, suffix: str) -> Path:
    return output / f"{stage.name.replace(' ', '-')}{suffix}.log"


def _shown(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()

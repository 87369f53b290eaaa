"""Runs one stage, in a process that run_stage() has started.

usage: python -m trunkline_bench.gpu.stage_main MODULE:FUNCTION --rows FD --output DIRECTORY [--tiny MODEL]

Writes JSON lines to the file descriptor: facts about the device, each row as soon as it is measured, and the error that
ended the stage, if any.
"""

import argparse
import faulthandler
import json
import os
import platform
import sys
import traceback
from datetime import UTC, datetime
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from trunkline_bench.gpu.stage_process import FRAME

PACKAGES = ("torch", "triton", "numpy", "protobuf", "transformers")
# Texts that mark device errors: torch raises AcceleratorError; triton and older versions of torch raise RuntimeError.
OF_DEVICE = ("CUDA error", "Triton Error [CUDA]", "CUBLAS_STATUS", "cudaError", "AcceleratorError")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("function")
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--tiny", type=Path, metavar="MODEL")
    arguments = parser.parse_args()
    faulthandler.enable()
    with os.fdopen(arguments.rows, "w") as lines:

        def tell(**said: object) -> None:
            lines.write(json.dumps(said) + "\n")
            lines.flush()

        try:
            import torch

            if not arguments.tiny and not torch.cuda.is_available():
                tell(no_gpu=True)
                return 1
            from trunkline_bench.gpu.shapes import Shapes

            device = torch.device("cpu" if arguments.tiny else "cuda")
            tell(facts=facts(platform.processor() if arguments.tiny else torch.cuda.get_device_name(device)))
            module, _, name = arguments.function.partition(":")
            for row in getattr(import_module(module), name)(Shapes.of(device, arguments.output, arguments.tiny)):
                tell(row=row)
        except Exception as error:  # later stages still run
            traceback.print_exc()
            trace = traceback.format_exc()
            frames = list(FRAME.finditer(trace))
            kernel = f"{frames[-1][1]}:{frames[-1][2]} in {frames[-1][3]}" if frames else ""
            shown = f"{type(error).__name__}: {error}"
            tell(failed=shown, kernel=kernel, of_device=any(sign in shown for sign in OF_DEVICE))
            return 1
    return 0


def facts(device: str) -> dict[str, object]:
    """Device, date and versions of a measurement."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue  # stages that need it report that
    return {
        "device": device,
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "versions": {**versions, "python": platform.python_version()},
    }


if __name__ == "__main__":
    sys.exit(main())

"""`make bench-gpu`: the stages, each in its own time, results flushed after each.

usage: python -m trunkline_bench.gpu.main [--output bench/results/gpu] [--only stage,…] [--tiny MODEL]

--tiny MODEL: the stages on a CPU with tiny shapes, the kernels interpreted (TRITON_INTERPRET=1), to try the stages.
"""

import argparse
import gc
import json
import platform
import sys
import time
import traceback
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import torch
import triton

from trunkline_bench.gpu import attention, ceilings, closed_loop, costs, engine, equality, hugging_face, token_wise
from trunkline_bench.gpu.ceilings import Rows
from trunkline_bench.gpu.shapes import Shapes

RESULTS = Path(__file__).parents[2] / "results" / "gpu"
STAGES: dict[str, Callable[[Shapes], Rows]] = {
    "ceilings": ceilings.measure,
    "attention correctness": attention.check,
    "other kernels' correctness": token_wise.check,
    "engine equality": equality.check,
    "decode attention": attention.decode_speed,
    "prefill attention": attention.prefill_speed,
    "engine": engine.measure,
    "closed loop": closed_loop.measure,
    "transformers": hugging_face.measure,
    "options": costs.measure,
    "weight-only options": costs.weight_only,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--only", default=",".join(STAGES), help="of " + ", ".join(STAGES))
    parser.add_argument("--minutes", type=float, default=9.0, help="no stage begins after this time")
    parser.add_argument("--tiny", type=Path, metavar="MODEL")
    arguments = parser.parse_args()
    names = [name.strip() for name in arguments.only.split(",")]
    if unknown := [name for name in names if name not in STAGES]:
        sys.exit(f"no stage is called {unknown[0]!r}; there are: {', '.join(STAGES)}")
    if not arguments.tiny and not torch.cuda.is_available():
        sys.exit("no GPU that torch can use: nothing is measured (--tiny MODEL tries the stages on a CPU)")
    device = torch.device("cpu" if arguments.tiny else "cuda")
    facts = {
        "device": platform.processor() if arguments.tiny else torch.cuda.get_device_name(device),
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "versions": {"torch": torch.__version__, "triton": triton.__version__, "python": platform.python_version()},
        "command": "make bench-gpu",
    }
    arguments.output.mkdir(parents=True, exist_ok=True)
    path = arguments.output / f"{facts['date']}.json"
    # What other stages found on this day stays.
    stages = json.loads(path.read_text())["stages"] if path.exists() else {}
    shapes = Shapes.of(device, arguments.output, arguments.tiny)
    failed = False
    began_s = time.perf_counter()
    for name in names:
        started_s = time.perf_counter()
        print(f"{name} …", flush=True)
        rows: Rows
        if started_s - began_s > arguments.minutes * 60:
            rows = [{"skipped": f"{arguments.minutes:g} minutes were over"}]
        else:
            try:
                rows = STAGES[name](shapes)
            except Exception as error:  # the other stages can still be measured
                traceback.print_exc()
                rows, failed = [{"failed": str(error)}], True
        gc.collect()
        if not arguments.tiny:
            torch.cuda.empty_cache()
        for row in rows:
            print("  " + "  ".join(f"{key}={_shown(value)}" for key, value in row.items()), flush=True)
        stages[name] = {"seconds": round(time.perf_counter() - started_s, 1), "rows": rows}
        path.write_text(json.dumps({**facts, "stages": stages}, indent=1) + "\n")
    sys.exit(failed)


def _shown(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()

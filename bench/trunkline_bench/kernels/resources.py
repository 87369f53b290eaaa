"""Compiles each Triton kernel and reports the resources that it needs of a chip. No GPU is needed.

usage: python -m trunkline_bench.kernels.resources [--output bench/results/kernels] [--targets sm_90,…]
       python -m trunkline_bench.kernels.resources --step qwen3-8b --batch 256 --context 1536 [--output …]

Kernels are compiled as their launchers would launch them for an 8B model (32 query heads, 8 KV heads of 128, hidden
4096, feed-forward 12288, bfloat16): the launchers run on tensors without memory, and their launches are recorded.
Prints registers, spills, shared memory, and whether tensor cores are used. Exits with status 1 if a hot kernel spills,
does not use tensor cores, or needs more shared memory than the chip has.

--step predicts instead how long a decode step takes on an H200, kernel by kernel.
"""

import argparse
import sys
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import torch
import triton

from trunkline_bench.kernels.cases import CASES, Case, decode_tiling
from trunkline_bench.kernels.device import H200, PROGRAM_SHARED, programs_per_multiprocessor
from trunkline_bench.kernels.launches import CHIPS, Chip, Resources, recorded, resources
from trunkline_bench.reports.markdown import table

# Kernels that need no tensor cores.
HELPERS = (
    "_plan_ranges", "_merge_split", "_quantize_rows", "_widen", "_choose_experts", "_arrange_tiles", "_sum_experts",
)  # fmt: skip


def problems(case: Case, found: Resources, chip: Chip) -> list[str]:
    """The violated requirements, one line each."""
    where = f"{case.name} ({found.kernel}) on {chip.name}"
    lines = []
    if case.hot and found.spills:
        lines.append(f"{where} spills {found.spills} bytes of registers")
    if case.products and found.kernel not in HELPERS and not found.tensor_cores:
        lines.append(f"{where} does not use tensor cores")
    if found.waits_late:
        lines.append(f"{where} is launched before its inputs are ready, and accesses memory before it waits for them")
    if found.shared > chip.shared_memory:
        lines.append(f"{where} needs {found.shared} bytes of shared memory; the chip has {chip.shared_memory}")
    if found.kernel == "_attend_ranges" and chip.target.backend == "cuda":
        tiling = decode_tiling(chip, torch.float8_e4m3fn if case.fp8 else torch.bfloat16)
        one = replace(H200, shared_memory=chip.shared_memory + PROGRAM_SHARED)
        fit = programs_per_multiprocessor(one, warps=tiling.warps, registers=found.registers, shared=found.shared)
        if fit < tiling.programs:
            lines.append(f"{where}: {fit} programs fit on a multiprocessor, but the tiling assumes {tiling.programs}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", default=",".join(CHIPS), help="any of " + ", ".join(CHIPS))
    parser.add_argument("--output", type=Path, help="folder for the table")
    parser.add_argument("--step", metavar="MODEL", help="predict a decode step of this model of bench/configs")
    parser.add_argument("--batch", type=int, default=256, help="sequences of the step")
    parser.add_argument("--context", type=int, default=1536, help="context of each sequence, in tokens")
    parser.add_argument("--weights", default="bfloat16", choices=("bfloat16", "fp8", "fp8-blocks"), help="of the step")
    parser.add_argument("--kv-dtype", default="bfloat16", choices=("bfloat16", "fp8"), help="of the step")
    arguments = parser.parse_args()
    if arguments.step:
        from trunkline_bench.kernels.step_prediction import page

        text = page(
            arguments.step, batch=arguments.batch, context=arguments.context, weights=arguments.weights,
            kv_dtype=arguments.kv_dtype,
        )  # fmt: skip
        _write(text, arguments.output, "step.md")
        return
    rows: dict[str, list[str]] = {}
    bad: list[str] = []
    for chip in (CHIPS[name] for name in arguments.targets.split(",")):
        for case in CASES:
            if case.fp8 and not chip.fp8:
                continue
            with recorded() as launches:
                case.run(chip)
            for launch in launches:
                found = resources(launch, chip)
                rows[f"{chip.name} · {case.name} · `{found.kernel}`"] = [
                    str(launch.options.get("num_warps", 4)), str(found.registers), str(found.spills),
                    f"{found.shared:,}", "yes" if found.tensor_cores else "",
                ]  # fmt: skip
                bad += problems(case, found, chip)
    columns = ("warps", "registers", "spilled bytes", "shared memory, bytes", "tensor cores")
    text = (
        "# Resources of the Triton kernels\n\n"
        + f"- date: {datetime.now(UTC):%Y-%m-%d}\n"
        + f"- versions: triton {triton.__version__}, torch {torch.__version__}\n"
        + "- command: `python -m trunkline_bench.kernels.resources --output bench/results/kernels` (no GPU is used)\n"
        + "- compiled for an 8B model: 32 query heads, 8 KV heads of 128, bfloat16\n\n"
        + table(rows, columns)
    )
    _write(text, arguments.output, "resources.md")
    for line in bad:
        print(line, file=sys.stderr)
    sys.exit(bool(bad))


def _write(text: str, folder: Path | None, name: str) -> None:
    print(text)
    if folder:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


if __name__ == "__main__":
    main()

"""`make bench-peer PEERS=DIR`: our engine against vLLM's CPU build, with the same model, dtype, threads and requests.

DIR/vllm is a virtual environment with vLLM. The two take turns, each run in a fresh process; the report has medians.
--model names a checkpoint with a vocabulary of 32,000 tokens or more, in place of a random Llama.
"""

import argparse
import contextlib
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from trunkline_bench.engine.peer_engine import WORKLOAD
from trunkline_bench.engine.random_model import RANDOM_22M, RANDOM_EXPERTS, write_random_model
from trunkline_bench.reports.markdown import listed
from trunkline_bench.reports.provenance import facts
from trunkline_worker.model.config_json import read_spec

REPOSITORY = Path(__file__).parents[3]
VLLM_SCRIPT = REPOSITORY.parent / "shared" / "peers" / "vllm_offline.py"
VLLM_ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "2", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
VLLM_LINE = re.compile(r"vLLM-CPU \S+: (\d+) requests of .*: ([\d.]+) tok/s")

Rates = dict[int, list[float]]  # by requests at once


def run(command: list[str], environment: dict[str, str]) -> str:
    """Returns a process's standard output. Raises SystemExit with its standard error if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment, check=False)
    if done.returncode:
        raise SystemExit(f"bench-peer: {' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return done.stdout


def vllm_rows(python: Path, model: Path, dtype: str, at_once: int) -> list[tuple[str, str]]:
    """Returns requests at once and tokens per second of each row up to `at_once`. Raises SystemExit if vLLM fails."""
    wanted, rows, told = sum(count <= at_once for count, _, _ in WORKLOAD), [], []
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [str(python), str(VLLM_SCRIPT), str(model), dtype], stdout=subprocess.PIPE, stderr=errors, text=True,
            env=os.environ | VLLM_ENVIRONMENT, start_new_session=True,
        )  # fmt: skip
        assert process.stdout is not None
        for line in process.stdout:
            told.append(line)
            rows += VLLM_LINE.findall(line)
            if len(rows) == wanted:
                break
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # with its engine; later rows may take many minutes
        process.wait()
        if len(rows) < wanted:
            errors.seek(0)
            raise SystemExit(f"bench-peer: vLLM reported {len(rows)} rows, not {wanted}:\n{errors.read()[-2000:]}")
    return rows


def measure(model: Path, dtype: str, python: Path, repeats: int, at_once: int) -> tuple[Rates, Rates, Rates]:
    """Returns (our rates, vLLM's rates, the bounds of the matrix products), in output tokens per second."""
    ours, theirs, floor = defaultdict(list), defaultdict(list), defaultdict(list)
    for turn in range(repeats):
        for line in run(
            [sys.executable, "-m", "trunkline_bench.engine.peer_engine", str(model), dtype, str(at_once)], {}
        ).splitlines():
            row = json.loads(line)
            ours[row["at_once"]].append(row["tok_s"])
            if "gemm_floor_tok_s" in row:
                floor[row["at_once"]].append(row["gemm_floor_tok_s"])
        for count, rate in vllm_rows(python, model, dtype, at_once):
            theirs[int(count)].append(float(rate))
        print(f"  {dtype}, turn {turn + 1}: ours {last(ours)}; vLLM {last(theirs)}", flush=True)
    return ours, theirs, floor


def last(rates: Rates) -> str:
    return ", ".join(f"{count}: {values[-1]:,.0f}" for count, values in rates.items())


def table(results: dict[str, tuple[Rates, Rates, Rates]]) -> str:
    lines = [
        "| dtype | at once | prompt + output | ours, tok/s | vLLM-CPU, tok/s | ratio | share of the GEMM floor |",
        "|---|---|---|---|---|---|---|",
    ]
    for dtype, (ours, theirs, floor) in results.items():
        for count, prompt, output in (row for row in WORKLOAD if row[0] in ours):
            mine, other = statistics.median(ours[count]), statistics.median(theirs[count])
            share = f"{mine / statistics.median(floor[count]):.0%}" if floor[count] else "-"
            lines.append(
                f"| {dtype} | {count} | {prompt} + {output} | {mine:,.0f} | {other:,.0f} "
                f"| {mine / other:.2f} | {share} |"
            )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", type=Path, required=True, help="folder with vllm/bin/python")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--model", type=Path, help="directory of a checkpoint; default: a random Llama")
    parser.add_argument("--experts", action="store_true", help="a random Qwen3-MoE with 64 experts in its place")
    parser.add_argument("--at-once", type=int, default=256, help="rows with at most so many requests at once")
    parser.add_argument("--output", type=Path, default=REPOSITORY / "bench" / "results")
    arguments = parser.parse_args()
    python = arguments.peers / "vllm" / "bin" / "python"
    for needed in (python, VLLM_SCRIPT):
        if not needed.exists():
            raise SystemExit(f"bench-peer: {needed} does not exist")
    # The folders differ between machines.
    flags = f"--repeats {arguments.repeats} --dtypes {' '.join(arguments.dtypes)} --at-once {arguments.at_once}"
    flags += (" --model …" if arguments.model else "") + " --experts" * arguments.experts
    command = f"make bench-peer PEERS=… ARGS='{flags}'"
    found = facts(command, "no GPU", ("trunkline", "torch"))
    vllm = run([str(python), "-c", "import importlib.metadata as m; print(m.version('vllm-cpu'))"], {}).strip()
    found["versions"] = f"vllm-cpu {vllm}, {found['versions']}"
    with tempfile.TemporaryDirectory() as scratch:
        model: Path = arguments.model or Path(scratch) / ("random-experts" if arguments.experts else "random-22m")
        if arguments.model is None:
            write_random_model(model, RANDOM_EXPERTS if arguments.experts else RANDOM_22M)
        spec = read_spec(model)
        results = {
            dtype: measure(model, dtype, python, arguments.repeats, arguments.at_once) for dtype in arguments.dtypes
        }
    text = (
        "# Our engine against vLLM's CPU build\n\n"
        + listed(found)
        + f"- model: {model.name}, {spec.architecture}, {spec.num_layers} layers, hidden size {spec.hidden_size}, "
        f"{(spec.layer_params + spec.head_params) / 1e6:.0f} M parameters; greedy, end of sequence ignored\n"
        f"- medians of {arguments.repeats} alternating runs, each in a fresh process\n"
        "- GEMM floor: the rate if a step took only the time of its matrix products, measured in our runs\n\n"
        + table(results)
    )
    arguments.output.mkdir(parents=True, exist_ok=True)
    of_model = f"-{model.name.lower()}" if arguments.model or arguments.experts else ""
    stem = arguments.output / f"cpu-vs-vllm{of_model}-{found['date']}"
    stem.with_suffix(".md").write_text(text)
    stem.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
    print(text)


if __name__ == "__main__":
    main()

"""`make bench-cpu MODEL=DIR`: the engine on this CPU, in both dtypes and with quantised weights, against transformers,
vLLM's CPU build if --peers names a folder with vllm/bin/python, and the memory's bandwidth.

Requests of one row arrive together, have the same lengths and end together, so that static batching pads nothing. Each
run has a fresh process; all kinds of runs take turns, and the report has medians.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
from collections import defaultdict
from dataclasses import asdict, fields
from pathlib import Path
from typing import NamedTuple

import torch

from trunkline_bench.engine.against_vllm import VLLM_ENVIRONMENT
from trunkline_bench.engine.measured_run import Job, Measured
from trunkline_bench.engine.workload import BenchRequest
from trunkline_bench.reports.markdown import listed
from trunkline_bench.reports.provenance import commit, facts, make_command
from trunkline_worker.model.config_json import read_spec

QUANTIZED_BYTES = {"int8": 1.0, "int4": 0.5 + 4 / 64}  # of a value, with its share of the scales
REPOSITORY = Path(__file__).parents[3]
PACKAGES = ("protos", "kernels", "worker", "bench")
AT_ONCE = (1, 16, 64)
PROMPT, OUTPUT = 32, 48  # tokens
# Name of a row: dtype and quantisation.
KINDS = {
    "bfloat16": ("bfloat16", "none"),
    "float32": ("float32", "none"),
    "int8": ("bfloat16", "int8"),
    "int4": ("bfloat16", "int4"),
}
PEERS = ("transformers", "vllm")
RUNS_ALONE = 5  # ours of one request in each turn: one is over in half a second, and the machine may be slow meanwhile

Times = dict[tuple[str, str, int], list[float]]  # output tokens per second by (runner, kind, requests at once)


class Alone(NamedTuple):
    """A run of one request."""

    step_s: float  # mean time from token to token
    bandwidth: float  # of memory, as Measured has it


def weight_bytes_read(model: Path, kind: str) -> float:
    """Bytes of weights that a step of one token reads: those of the layers, without experts that it does not use, and
    of the head."""
    spec = read_spec(model)
    dtype, quantization = KINDS[kind]
    itemsize: int = getattr(torch, dtype).itemsize
    return spec.token_params * QUANTIZED_BYTES.get(quantization, itemsize) + spec.head_params * itemsize


def requests(count: int, vocab_size: int) -> list[BenchRequest]:
    draw = random.Random(count)
    return [BenchRequest([draw.randrange(3, vocab_size) for _ in range(PROMPT)], OUTPUT) for _ in range(count)]


def measure(job: Job, checkout: Path, python: str) -> Measured:
    """Runs a job by the code of a checkout. Raises SystemExit if it fails."""
    values = asdict(job)
    told = {field.name: values[field.name] for field in fields(job) if values[field.name] != field.default}
    done = subprocess.run(
        [python, "-m", "trunkline_bench.engine.measured_run"],
        input=json.dumps(told),  # without defaults, which earlier code may not know
        env=os.environ
        | VLLM_ENVIRONMENT
        | {"PYTHONPATH": os.pathsep.join(str(checkout / name) for name in PACKAGES), "VLLM_LOGGING_LEVEL": "ERROR"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"bench-cpu: the run of {job.runner} failed:\n{done.stderr[-2000:]}")
    return Measured(**json.loads(done.stdout.splitlines()[-1]))


def table(times: Times, alone: dict[str, list[Alone]], runners: list[str], model: Path) -> str:
    """alone: runs of one request by kind; times: of each of these kinds"""
    peers = [runner for runner in runners if runner in PEERS]
    relative = " | ".join(f"ours, relative to {peer}" for peer in peers)
    lines = [
        f"| weights | at once | {' | '.join(f'{runner}, tok/s' for runner in runners)} "
        f"| {relative} | memory, GB/s | weights read, share of it |",
        "|---|---|" + "---|" * (len(runners) + len(peers) + 2),
    ]
    for kind, runs in alone.items():
        dtype, _ = KINDS[kind]
        for count in AT_ONCE:
            # The others compute with the dtype's weights.
            rates = {
                runner: statistics.median(times[runner, kind if runner == "ours" else dtype, count])
                for runner in runners
            }
            ratios = " | ".join(f"{rates['ours'] / rates[peer]:.2f}" for peer in peers)
            bandwidth = statistics.median(run.bandwidth for run in runs)
            share = weight_bytes_read(model, kind) / statistics.median(run.step_s * run.bandwidth for run in runs)
            lines.append(
                f"| {kind} | {count} | {' | '.join(f'{rates[runner]:,.1f}' for runner in runners)} "
                f"| {ratios} | {f'{bandwidth / 1e9:.1f} | {share:.0%}' if count == 1 else '- | -'} |"
            )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="folder of a checkpoint")
    parser.add_argument("--before", type=Path, help="a checkout of earlier code, for one more column")
    parser.add_argument("--peers", type=Path, help="folder with vllm/bin/python, for one more column")
    # Others than ours have the dtypes of these, so quantised weights come after bfloat16.
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="forms of weights")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path, default=REPOSITORY / "bench" / "results")
    arguments = parser.parse_args()
    model: Path = arguments.model
    vocab_size = read_spec(model).vocab_size
    threads = len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    checkouts = {"ours": REPOSITORY, "transformers": REPOSITORY}
    if arguments.before is not None:
        checkouts = {"before": arguments.before.resolve(), **checkouts}
    pythons = dict.fromkeys(checkouts, sys.executable)
    if arguments.peers is not None:
        checkouts["vllm"], pythons["vllm"] = REPOSITORY, str(arguments.peers / "vllm" / "bin" / "python")
    flags = ["--repeats", str(arguments.repeats), "--kinds", *arguments.kinds]
    command = make_command("bench-cpu MODEL=…", flags + ["--peers", "DIR"] * (arguments.peers is not None))
    found = facts(command, "no GPU", ("trunkline", "torch", "transformers"))
    times: Times = defaultdict(list)
    alone: dict[str, list[Alone]] = defaultdict(list)
    for turn in range(arguments.repeats):
        for kind in arguments.kinds:
            dtype, quantization = KINDS[kind]
            for count in AT_ONCE:
                told = []
                for name, checkout in checkouts.items():
                    runner = name if name in PEERS else "engine"
                    if quantization != "none" and name != "ours":
                        continue
                    is_alone = name == "ours" and count == 1
                    job = Job(
                        runner, str(model), dtype, threads, count, requests(count, vocab_size), quantization, is_alone
                    )
                    for _ in range(RUNS_ALONE if is_alone else 1):
                        measured = measure(job, checkout, pythons[name])
                        times[name, kind, count].append(measured.output_tokens / measured.seconds)
                        told.append(f"{name} {times[name, kind, count][-1]:,.1f} tok/s")
                        if measured.bandwidth is not None and measured.first_token_s is not None:
                            step_s = (measured.seconds - measured.first_token_s) / (OUTPUT - 1)
                            alone[kind].append(Alone(step_s, measured.bandwidth))
                            told.append(f"memory {measured.bandwidth / 1e9:.1f} GB/s")
                print(f"  turn {turn + 1}, {kind}, {count} at once: {', '.join(told)}", flush=True)
    earlier = f"- before: {commit(checkouts['before'])}\n" if "before" in checkouts else ""
    text = (
        f"# {model.name} on a CPU\n\n"
        + listed(found)
        + f"- prompts of {PROMPT} tokens, outputs of {OUTPUT}; greedy, end of sequence ignored\n"
        "- requests arrive together\n"
        f"- medians of {arguments.repeats} alternating runs, {RUNS_ALONE} times as many of ours with one request; "
        f"each in a fresh process with {threads} threads\n"
        "- memory: what all threads together read; the mean of a reading right before the run and one right after it\n"
        "- share of it: of the weights that a step of one request reads, in the mean time from token to token\n"
        + earlier
        + "\n"
        + table(times, alone, list(checkouts), model)
    )
    arguments.output.mkdir(parents=True, exist_ok=True)
    path = arguments.output / f"cpu-{model.name}-{found['date']}.md"
    path.write_text(text)
    print(text)


if __name__ == "__main__":
    main()

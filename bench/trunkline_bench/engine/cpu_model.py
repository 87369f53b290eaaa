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
import time
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path

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
READ_BYTES = 1 << 30  # far more than any cache
READS = 5

Times = dict[tuple[str, str, int], list[float]]  # output tokens per second by (runner, kind, requests at once)


def memory_bandwidth() -> float:
    """Bytes per second at which all cores together read memory: the best of some sums over a large array."""
    values = torch.ones(READ_BYTES // 4)
    best_s = float("inf")
    for _ in range(READS):
        started_s = time.perf_counter()
        values.sum()
        best_s = min(best_s, time.perf_counter() - started_s)
    return READ_BYTES / best_s


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
    done = subprocess.run(
        [python, "-m", "trunkline_bench.engine.measured_run"],
        input=json.dumps({name: value for name, value in asdict(job).items() if value != "none"}),  # for earlier code
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


def table(times: Times, steps_s: dict[str, list[float]], runners: list[str], model: Path, bandwidth: float) -> str:
    """steps_s: mean times from token to token of one request, by kind"""
    peers = [runner for runner in runners if runner in PEERS]
    relative = " | ".join(f"ours, relative to {peer}" for peer in peers)
    lines = [
        f"| weights | at once | {' | '.join(f'{runner}, tok/s' for runner in runners)} "
        f"| {relative} | weights read, share of bandwidth |",
        "|---|---|" + "---|" * (len(runners) + len(peers) + 1),
    ]
    for kind in steps_s:
        dtype, _ = KINDS[kind]
        for count in AT_ONCE:
            # The others compute with the dtype's weights.
            rates = {
                runner: statistics.median(times[runner, kind if runner == "ours" else dtype, count])
                for runner in runners
            }
            share = f"{weight_bytes_read(model, kind) / statistics.median(steps_s[kind]) / bandwidth:.0%}"
            ratios = " | ".join(f"{rates['ours'] / rates[peer]:.2f}" for peer in peers)
            lines.append(
                f"| {kind} | {count} | {' | '.join(f'{rates[runner]:,.1f}' for runner in runners)} "
                f"| {ratios} | {share if count == 1 else '-'} |"
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
    steps_s: dict[str, list[float]] = defaultdict(list)
    bandwidth = 0.0
    for turn in range(arguments.repeats):
        bandwidth = max(bandwidth, memory_bandwidth())
        for kind in arguments.kinds:
            dtype, quantization = KINDS[kind]
            for count in AT_ONCE:
                told = []
                for name, checkout in checkouts.items():
                    runner = name if name in PEERS else "engine"
                    if quantization != "none" and name != "ours":
                        continue
                    job = Job(runner, str(model), dtype, threads, count, requests(count, vocab_size), quantization)
                    measured = measure(job, checkout, pythons[name])
                    times[name, kind, count].append(measured.output_tokens / measured.seconds)
                    if name == "ours" and count == 1 and measured.first_token_s is not None:
                        steps_s[kind].append((measured.seconds - measured.first_token_s) / (OUTPUT - 1))
                    told.append(f"{name} {times[name, kind, count][-1]:,.1f}")
                print(f"  turn {turn + 1}, {kind}, {count} at once: {', '.join(told)} tok/s", flush=True)
    earlier = f"- before: {commit(checkouts['before'])}\n" if "before" in checkouts else ""
    text = (
        f"# {model.name} on a CPU\n\n"
        + listed(found)
        + f"- prompts of {PROMPT} tokens, outputs of {OUTPUT}; greedy, end of sequence ignored\n"
        "- requests arrive together\n"
        f"- medians of {arguments.repeats} alternating runs, each in a fresh process with {threads} threads\n"
        f"- memory: {bandwidth / 1e9:.1f} GB/s, read by all threads together\n"
        "- share of bandwidth: of the weights that a step of one request reads, in the mean time from token to token\n"
        + earlier
        + "\n"
        + table(times, steps_s, list(checkouts), model, bandwidth)
    )
    arguments.output.mkdir(parents=True, exist_ok=True)
    path = arguments.output / f"cpu-{model.name}-{found['date']}.md"
    path.write_text(text)
    print(text)


if __name__ == "__main__":
    main()

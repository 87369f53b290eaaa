"""`make bench-engine`: the engine's continuous batching against transformers' static-batch generate.

Both have the same model, dtype, threads and requests. Each measurement runs in a fresh process; the two take turns, and
the report has medians. Static batching uses its best batch size, found on a part of the workload first.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from trunkline_bench.engine.measured_run import Job, Measured
from trunkline_bench.engine.random_model import write_random_model
from trunkline_bench.engine.workload import BenchRequest, azure_lengths, scaled_requests
from trunkline_bench.reports.markdown import listed
from trunkline_bench.reports.provenance import facts, make_command
from trunkline_bench.servers.demo_model import DEMO_MODEL

REPOSITORY = Path(__file__).parents[3]
AZURE_TRACE = REPOSITORY.parent / "shared" / "traces" / "azure_2023_conversation.csv"
STATIC_BATCH_SIZES = (4, 8, 16, 32, 64)
CONCURRENCY = 64


@dataclass(frozen=True, slots=True)
class Comparison:
    """One row of the report."""

    model: str
    dtype: str
    concurrency: int
    requests: int
    static_batch_size: int
    engine_tok_s: list[float]
    static_tok_s: list[float]
    engine_peak_mib: float
    static_peak_mib: float
    padding_share: float  # of the positions that static batching computed

    @property
    def ratio(self) -> float:
        return statistics.median(self.engine_tok_s) / statistics.median(self.static_tok_s)


def measure(job: Job) -> Measured:
    """Runs a job in a fresh process. Raises SystemExit if it fails."""
    done = subprocess.run(
        [sys.executable, "-m", "trunkline_bench.engine.measured_run"],
        input=json.dumps(asdict(job)),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"bench-engine: the {job.runner} run failed:\n{done.stderr[-2000:]}")
    return Measured(**json.loads(done.stdout.splitlines()[-1]))


def tok_s(measured: Measured) -> float:
    return measured.output_tokens / measured.seconds


def best_static_batch_size(model: Path, dtype: str, threads: int, requests: list[BenchRequest]) -> int:
    rates = {
        size: tok_s(measure(Job("transformers", str(model), dtype, threads, size, requests)))
        for size in STATIC_BATCH_SIZES
    }
    print(
        "  static batch size → tok/s: " + ", ".join(f"{size}: {rate:.0f}" for size, rate in rates.items()), flush=True
    )
    return max(rates, key=lambda size: rates[size])


def compare(
    model: Path, dtype: str, threads: int, requests: list[BenchRequest], concurrency: int, static: int, repeats: int
) -> Comparison:
    """Runs the engine and static batching in turns."""
    engine, other = [], []
    for _ in range(repeats):
        engine.append(measure(Job("engine", str(model), dtype, threads, concurrency, requests)))
        other.append(measure(Job("transformers", str(model), dtype, threads, static, requests)))
    needed = engine[0].tokens_computed
    row = Comparison(
        model.name,
        dtype,
        concurrency,
        len(requests),
        static,
        [tok_s(m) for m in engine],
        [tok_s(m) for m in other],
        max(m.peak_rss_mib for m in engine),
        max(m.peak_rss_mib for m in other),
        1 - needed / other[0].tokens_computed,
    )
    print(f"  {concurrency} at once: {row.ratio:.2f} x static ({row})", flush=True)
    return row


def markdown(rows: list[Comparison], found: dict[str, str]) -> str:
    lines = [
        "# Engine against static batching",
        "",
        listed(found),
        "| model | dtype | at once | requests | engine tok/s | static tok/s (batch size) | ratio | static padding "
        "| peak memory engine / static, MiB |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        engine, static = statistics.median(row.engine_tok_s), statistics.median(row.static_tok_s)
        lines.append(
            f"| {row.model} | {row.dtype} | {row.concurrency} | {row.requests} | {engine:.0f} "
            f"| {static:.0f} ({row.static_batch_size}) "
            f"| {row.ratio:.2f} | {row.padding_share:.0%} | {row.engine_peak_mib:.0f} / {row.static_peak_mib:.0f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", type=Path, default=AZURE_TRACE, help="Azure LLM inference trace, CSV")
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--scale", type=float, default=0.25, help="multiplies the trace's lengths")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16", help="dtype of both (the demo model is stored in bfloat16)")
    parser.add_argument("--output", type=Path, default=REPOSITORY / "bench" / "results")
    arguments = parser.parse_args()
    if not arguments.trace.is_file():
        raise SystemExit(f"bench-engine: no trace at {arguments.trace}: give --trace")
    flags = {name: str(getattr(arguments, name)) for name in ("requests", "scale", "repeats", "dtype")}
    command = make_command("bench-engine", [part for name, value in flags.items() for part in (f"--{name}", value)])
    found = facts(command, "all of them for each run", ("trunkline", "torch", "transformers"))
    threads = len(os.sched_getaffinity(0))
    lengths = azure_lengths(arguments.trace)
    rows: list[Comparison] = []
    with tempfile.TemporaryDirectory() as scratch:
        random_model = Path(scratch) / "random-22m"
        write_random_model(random_model)
        for model in (DEMO_MODEL, random_model):
            config = json.loads((model / "config.json").read_text())
            requests = scaled_requests(
                lengths,
                count=arguments.requests,
                scale=arguments.scale,
                context_length=min(config["max_position_embeddings"], 2048),
                vocab_size=config["vocab_size"],
                seed=0,
            )
            print(
                f"{model.name}: {sum(len(r.prompt) for r in requests)} prompt tokens, "
                f"{sum(r.output_tokens for r in requests)} output tokens",
                flush=True,
            )
            static = best_static_batch_size(model, arguments.dtype, threads, requests[:128])
            rows.append(compare(model, arguments.dtype, threads, requests, CONCURRENCY, static, arguments.repeats))
            rows.append(compare(model, arguments.dtype, threads, requests[:12], 1, 1, arguments.repeats))
    found["workload"] = (
        f"{arguments.requests} requests of {arguments.trace.name}, both lengths x {arguments.scale}, "
        f"random prompts; medians of {arguments.repeats} alternating runs, each in a fresh process"
    )
    arguments.output.mkdir(parents=True, exist_ok=True)
    stem = arguments.output / f"engine-{arguments.dtype}-{found['date']}"
    stem.with_suffix(".json").write_text(
        json.dumps({"facts": found, "rows": [asdict(row) for row in rows]}, indent=1) + "\n"
    )
    stem.with_suffix(".md").write_text(text := markdown(rows, found))
    print(text)


if __name__ == "__main__":
    main()

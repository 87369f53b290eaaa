"""`make bench-http-peer PEERS=DIR`: client → our router → our worker, against client → SMG → vLLM, over HTTP.

DIR has two virtual environments: DIR/vllm with vLLM's CPU build, its gRPC servicer and aiohttp, and DIR/smg. Both
stacks serve the same model and run throughout; the same client loads them in turns. While one is loaded, the other is
idle.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from trunkline_bench.reports.markdown import listed
from trunkline_bench.reports.provenance import facts
from trunkline_bench.servers.http_stack import http_stack, log_ends, process, wait_for_completion
from trunkline_bench.servers.ports import free_port

REPOSITORY = Path(__file__).parents[3]
SHARED = Path(os.environ.get("TRUNKLINE_SHARED", REPOSITORY.parent / "shared"))
CLIENT, MAKE_MODEL = SHARED / "peers" / "load_openai.py", SHARED / "peers" / "make_random_model.py"
VLLM_ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "2", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
# Requests at once, and requests in all. Each has a prompt of six lines, about 80 tokens, and OUTPUT_TOKENS of output.
WORKLOAD = ((16, 64), (64, 192), (256, 512))
OUTPUT_TOKENS = 64
LINE = re.compile(r": (\d+) tok/s, [\d.]+ req/s, TTFT p50 (\d+) ms p99 (\d+) ms")
OURS, THEIRS = "ours", "SMG and vLLM"

# tok/s, TTFT p50 in ms, TTFT p99 in ms: by stack and requests at once
Figures = dict[str, dict[int, list[tuple[float, float, float]]]]


@contextmanager
def their_stack(peers: Path, model: Path, dtype: str, logs: Path) -> Iterator[str]:
    """vLLM's gRPC server and SMG with the cache-aware policy. Yields the URL."""
    worker, port, metrics = free_port(), free_port(), free_port()
    with ExitStack() as stack:
        command = [
            str(peers / "vllm/bin/vllm"), "serve", str(model), "--grpc", "--host", "127.0.0.1", "--port", str(worker),
            "--dtype", dtype, "--enforce-eager",
        ]  # fmt: skip
        stack.enter_context(process(command, VLLM_ENVIRONMENT, logs / "vllm.log"))
        command = [
            str(peers / "smg/bin/smg"), "launch", "--host", "127.0.0.1", "--port", str(port), "--worker-urls",
            f"grpc://127.0.0.1:{worker}", "--policy", "cache_aware", "--model-path", str(model),
            "--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics),
        ]  # fmt: skip
        stack.enter_context(process(command, {}, logs / "smg.log"))
        yield f"http://127.0.0.1:{port}"


def load(peers: Path, url: str, model: str, at_once: int, requests: int) -> tuple[float, float, float]:
    """Returns output tokens per second, and TTFT p50 and p99 in ms."""
    sizes = (str(at_once), str(requests), str(OUTPUT_TOKENS))
    command = [str(peers / "vllm/bin/python"), str(CLIENT), url, model, *sizes]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = LINE.search(done.stdout)
    if done.returncode or found is None:
        raise SystemExit(f"bench-http-peer: the client failed at {url}:\n{done.stderr[-2000:]}")
    return float(found[1]), float(found[2]), float(found[3])


def measure(peers: Path, model: Path, dtype: str, repeats: int, logs: Path) -> Figures:
    """Loads both stacks in turns, whose order changes with each repetition."""
    figures: Figures = {OURS: defaultdict(list), THEIRS: defaultdict(list)}
    our_stack = http_stack(model, str(model), logs, (f"--dtype={dtype}",))
    with our_stack as ours, their_stack(peers, model, dtype, logs) as theirs:
        stacks = [(OURS, ours), (THEIRS, theirs)]
        for _, url in stacks:
            try:
                wait_for_completion(url, str(model))
            except TimeoutError as error:
                raise SystemExit(f"bench-http-peer: {error}\n{log_ends(logs)}") from error
        for _, url in stacks:  # our scheduler learns what steps cost, vLLM compiles; neither counts
            load(peers, url, str(model), *WORKLOAD[0])
        for _ in range(repeats):
            for at_once, requests in WORKLOAD:
                for name, url in stacks:
                    figures[name][at_once].append(load(peers, url, str(model), at_once, requests))
                    print(f"  {name}, {at_once} at once: {figures[name][at_once][-1]}", flush=True)
            stacks.reverse()
    return figures


def table(figures: Figures) -> str:
    """Returns medians; the ratio is that of each repetition, so that noise that both had in common does not count."""
    lines = [
        "| at once | ours, tok/s | SMG and vLLM, tok/s | ratio | TTFT p50, ms: ours, theirs | p99, ms: ours, theirs |",
        "|---|---|---|---|---|---|",
    ]
    for at_once, _ in WORKLOAD:
        ours, theirs = figures[OURS][at_once], figures[THEIRS][at_once]
        ratio = statistics.median(mine[0] / other[0] for mine, other in zip(ours, theirs, strict=True))
        mine, other = ([statistics.median(column) for column in zip(*rows, strict=True)] for rows in (ours, theirs))
        lines.append(
            f"| {at_once} | {mine[0]:,.0f} | {other[0]:,.0f} | {ratio:.2f} | {mine[1]:,.0f}, {other[1]:,.0f} "
            f"| {mine[2]:,.0f}, {other[2]:,.0f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", type=Path, required=True, help="folder with vllm/bin/vllm and smg/bin/smg")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--output", type=Path, default=REPOSITORY / "bench" / "results")
    arguments = parser.parse_args()
    peers = arguments.peers.absolute()
    for needed in (peers / "vllm/bin/vllm", peers / "smg/bin/smg", CLIENT):
        if not needed.exists():
            raise SystemExit(f"bench-http-peer: {needed} does not exist")
    flags = f"--repeats {arguments.repeats} --dtype {arguments.dtype}"
    found = facts(f"make bench-http-peer PEERS=… ARGS='{flags}'", "no GPU", ("trunkline", "torch"))
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model = folder / "random-22m"
        subprocess.run([sys.executable, str(MAKE_MODEL), str(model)], check=True)
        figures = measure(peers, model, arguments.dtype, arguments.repeats, folder)
    text = (
        "# Over HTTP: our router and worker against SMG and vLLM's CPU build\n\n"
        + listed(found)
        + f"- model: a random Llama of 22 M parameters, {arguments.dtype}; greedy, end of sequence ignored\n"
        f"- medians of {arguments.repeats} repetitions in alternating order; both stacks run throughout, "
        "and are loaded once before\n"
        f"- each request: a prompt of six lines of text, {OUTPUT_TOKENS} output tokens, streamed\n\n" + table(figures)
    )
    arguments.output.mkdir(parents=True, exist_ok=True)
    stem = arguments.output / f"http-vs-smg-{found['date']}"
    stem.with_suffix(".md").write_text(text)
    stem.with_suffix(".json").write_text(json.dumps(figures, indent=1) + "\n")
    print(text)


if __name__ == "__main__":
    main()

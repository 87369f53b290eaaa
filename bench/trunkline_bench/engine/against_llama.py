"""`make bench-gguf PEERS=DIR`: our router and worker against llama.cpp's server, over HTTP, with the same GGUF files.

DIR/llama is a virtual environment with xllamacpp, which has llama.cpp's server. The files are SmolLM2's own, in 4
bits, and what `gguf` makes of it in bfloat16 and in 8 bits. For each file both servers run throughout, and
the same client loads them in turns. While one is loaded, the other is idle.
"""

import argparse
import asyncio
import random
import statistics
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import gguf
from openai import AsyncOpenAI

from trunkline_bench.engine.against_smg import REPOSITORY
from trunkline_bench.reports.markdown import listed, table
from trunkline_bench.reports.provenance import facts, make_command
from trunkline_bench.servers.http_stack import http_stack, log_ends, process, wait_for_completion
from trunkline_bench.servers.ports import free_port

# Requests at once, and requests in all. Each has a prompt of two lines, about 50 tokens, and OUTPUT_TOKENS of output.
WORKLOAD = ((1, 4), (8, 24), (16, 32), (64, 64))
OUTPUT_TOKENS = 64
TEXT, SHORTEST_LINE = REPOSITORY / "docs" / "operations.md", 60  # characters
CONTEXT = 512  # of each of llama.cpp's places for a request
NAME = "model"
SERVER = """
import sys, threading, xllamacpp
given = xllamacpp.CommonParams()
given.model.path = sys.argv[1]
given.port, given.n_parallel, given.n_ctx, num_threads = map(int, sys.argv[2:])
given.cpuparams.n_threads = given.cpuparams_batch.n_threads = num_threads
given.cache_prompt = False
server = xllamacpp.Server(given)
threading.Event().wait()
"""
HEAD = ("ours, tok/s", "llama.cpp, tok/s", "ratio", "TTFT p50, ms: ours, theirs")

Figures = dict[tuple[str, int], list[tuple[float, float]]]  # tok/s and TTFT p50 in ms, by stack and requests at once


def write_as(kind: gguf.GGMLQuantizationType, source: Path, target: Path) -> None:
    """Writes a GGUF file again, with its matrices as another kind."""
    read = gguf.GGUFReader(source)
    architecture = read.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target, architecture)
    for field in read.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        sub_type = field.types[-1] if field.types[0] is gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), field.types[0], sub_type)
    for tensor in read.tensors:
        if len(tensor.shape) < 2:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
            continue
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@contextmanager
def llama_server(python: Path, model: Path, threads: int, logs: Path) -> Iterator[str]:
    """Yields the URL."""
    port, places = free_port(), max(at_once for at_once, _ in WORKLOAD)
    arguments = map(str, (model, port, places, places * CONTEXT, threads))
    with process([str(python), "-c", SERVER, *arguments], {}, logs / "llama.log"):
        yield f"http://127.0.0.1:{port}"


async def load(url: str, at_once: int, requests: int, seed: int) -> tuple[float, float]:
    """Streams so many completions, `at_once` at a time. Returns output tokens per second, and TTFT p50 in ms.

    seed: of the prompts: no cached prefix is of use where it differs
    """
    draw = random.Random(seed)
    lines = [line for line in TEXT.read_text().splitlines() if len(line) > SHORTEST_LINE]
    prompts = [" ".join(draw.sample(lines, 2)) for _ in range(requests)]
    room = asyncio.Semaphore(at_once)

    async def first_token_s(client: AsyncOpenAI, prompt: str) -> float:
        async with room:
            started_s, first_s = time.perf_counter(), 0.0
            stream = await client.completions.create(
                model=NAME, prompt=prompt, max_tokens=OUTPUT_TOKENS, temperature=0, stream=True,
                extra_body={"ignore_eos": True},
                extra_headers={"connection": "close"},  # llama.cpp's server closes connections that were to be kept
            )  # fmt: skip
            async for _ in stream:
                first_s = first_s or time.perf_counter() - started_s
            return first_s

    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=600.0, max_retries=0) as client:
        started_s = time.perf_counter()
        ttfts_s = await asyncio.gather(*(first_token_s(client, prompt) for prompt in prompts))
        seconds = time.perf_counter() - started_s
    return requests * OUTPUT_TOKENS / seconds, 1e3 * statistics.median(ttfts_s)


def measure(python: Path, model: Path, threads: int, repeats: int, logs: Path) -> Figures:
    """Loads both servers in turns, whose order changes with each repetition."""
    figures: Figures = defaultdict(list)
    with (
        http_stack(model, NAME, logs, (f"--threads={threads}",)) as ours,
        llama_server(python, model, threads, logs) as theirs,
    ):
        stacks = [("ours", ours), ("theirs", theirs)]
        for _, url in stacks:
            try:
                wait_for_completion(url, NAME)
            except TimeoutError as error:
                raise SystemExit(f"bench-gguf: {error}\n{log_ends(logs)}") from error
            asyncio.run(load(url, *WORKLOAD[-2], seed=0))  # our scheduler learns what steps cost, and does not count
        for turn in range(1, repeats + 1):
            for at_once, requests in WORKLOAD:
                for name, url in stacks:
                    figures[name, at_once].append(asyncio.run(load(url, at_once, requests, seed=1000 * turn + at_once)))
                    print(f"  {model.name}, {name}, {at_once} at once: {figures[name, at_once][-1]}", flush=True)
            stacks.reverse()
    return figures


def rows(kind: str, figures: Figures) -> dict[str, list[str]]:
    """Medians; the ratio is that of each repetition, so that noise that both had in common does not count."""
    found = {}
    for at_once, _ in WORKLOAD:
        ours, theirs = figures["ours", at_once], figures["theirs", at_once]
        ratio = statistics.median(mine[0] / other[0] for mine, other in zip(ours, theirs, strict=True))
        mine, other = ([statistics.median(column) for column in zip(*each, strict=True)] for each in (ours, theirs))
        cells = [f"{mine[0]:,.0f}", f"{other[0]:,.0f}", f"{ratio:.2f}", f"{mine[1]:,.0f}, {other[1]:,.0f}"]
        found[f"{kind}, {at_once}"] = cells
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", type=Path, required=True, help="folder with llama/bin/python")
    parser.add_argument("--model", type=Path, required=True, help="a GGUF file")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path, default=REPOSITORY / "bench" / "results")
    arguments = parser.parse_args()
    python = arguments.peers.absolute() / "llama/bin/python"
    for needed in (python, arguments.model):
        if not needed.exists():
            raise SystemExit(f"bench-gguf: {needed} does not exist")
    asked = ["-c", "import importlib.metadata as m; print(m.version('xllamacpp'))"]
    theirs = subprocess.run([str(python), *asked], capture_output=True, text=True, check=True).stdout.strip()
    flags = ["--repeats", str(arguments.repeats), "--threads", str(arguments.threads)]
    found = facts(make_command("bench-gguf", flags), "no GPU", ("trunkline", "torch"))
    found["versions"] = f"xllamacpp {theirs}, {found['versions']}"
    measured: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for kind in (gguf.GGMLQuantizationType.BF16, gguf.GGMLQuantizationType.Q8_0):
            write_as(kind, arguments.model, folder / f"{kind.name}.gguf")
        for model in (folder / "BF16.gguf", folder / "Q8_0.gguf", arguments.model):
            measured |= rows(
                model.stem.rpartition(".")[2], measure(python, model, arguments.threads, arguments.repeats, folder)
            )
    text = (
        f"# Over HTTP: our router and worker against llama.cpp's server\n\n{listed(found)}"
        f"- model: {arguments.model.stem.split('.')[0]}; greedy, end of sequence ignored\n"
        f"- medians of {arguments.repeats} repetitions in alternating order; both servers run throughout, "
        "and are loaded once before\n"
        "- each request: a prompt of two lines of text, which differ between runs, and "
        f"{OUTPUT_TOKENS} output tokens, streamed\n\n" + table(measured, HEAD, "weights, requests at once")
    )
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / f"http-vs-llama-{found['date']}.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()

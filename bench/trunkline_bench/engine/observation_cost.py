"""`make bench-observation`: what traces and metrics cost a worker.

Two real workers compute the same requests in turn: one exports nothing; of the other, metrics are scraped every second
and a tenth of the requests is traced to an OTLP receiver. CPU time is compared, of front and engine together, because
it depends little on what else the machine does.
"""

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc

from trunkline.v1.generation_pb2 import SamplingParams
from trunkline.v1.worker_pb2 import GetModelRequest, Submit, WorkerServiceGenerateRequest
from trunkline.v1.worker_pb2_grpc import WorkerServiceStub
from trunkline_bench.reports.markdown import listed
from trunkline_bench.reports.provenance import facts, make_command
from trunkline_bench.servers.demo_model import DEMO_MODEL
from trunkline_bench.servers.ports import free_port

REPOSITORY = Path(__file__).parents[3]
PACKAGES = ("protos", "kernels", "worker", "router")
START_TIMEOUT_S = 60.0
TRACED_SHARE = 10  # one of so many requests
PROMPT, OUTPUT = 32, 128
RECEIVER = "opentelemetry.proto.collector.trace.v1.TraceService"
CLOCK_HZ = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True, eq=False)
class Worker:
    """A running worker."""

    process: subprocess.Popen[bytes]
    address: str
    metrics_port: int | None

    def cpu_s(self) -> float:
        """CPU time of the front and its engine since their start."""
        ticks = 0
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = stat.read_text().rpartition(")")[2].split()
            except OSError:
                continue  # it has ended
            if self.process.pid in (int(stat.parent.name), int(fields[1])):
                ticks += int(fields[11]) + int(fields[12])
        return ticks / CLOCK_HZ


@contextmanager
def receiver() -> Iterator[str]:
    """An OTLP receiver that drops what it gets; yields its URL."""
    export: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_unary_rpc_method_handler(lambda message, context: b"")
    server = grpc.server(ThreadPoolExecutor(1))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(RECEIVER, {"Export": export}),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.stop(None)


@contextmanager
def running(checkout: Path, collector: str | None) -> Iterator[Worker]:
    """A worker of a checkout; `collector` None: nothing is observed."""
    port, metrics_port = free_port(), None if collector is None else free_port()
    flags = [f"--model={DEMO_MODEL}", f"--port={port}", "--threads=1", "--device=cpu"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(str(checkout / name) for name in PACKAGES)}
    if collector is not None:
        flags.append(f"--metrics-port={metrics_port}")
        environment |= {"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_ENDPOINT": collector}
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "trunkline_worker.main", *flags], env=environment, cwd=checkout, stderr=log
        )
        try:
            with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
                WorkerServiceStub(channel).GetModel(GetModelRequest(), timeout=START_TIMEOUT_S, wait_for_ready=True)
            yield Worker(process, f"127.0.0.1:{port}", metrics_port)
        finally:
            process.terminate()
            process.wait()


@asynccontextmanager
async def scraped(worker: Worker) -> AsyncIterator[None]:
    """Reads the worker's metrics every second inside the block."""

    def scrape() -> None:
        with urllib.request.urlopen(f"http://127.0.0.1:{worker.metrics_port}/metrics") as answer:
            answer.read()

    async def scrape_on() -> None:
        while True:
            await asyncio.to_thread(scrape)
            await asyncio.sleep(1.0)

    scraping = asyncio.create_task(scrape_on()) if worker.metrics_port is not None else None
    try:
        yield
    finally:
        if scraping is not None:
            scraping.cancel()


async def tokens_per_cpu_s(worker: Worker, requests: int, at_once: int) -> float:
    """Output tokens per second of CPU time, of this many requests."""
    turns = asyncio.Semaphore(at_once)
    async with grpc.aio.insecure_channel(worker.address) as channel, scraped(worker):
        stub = WorkerServiceStub(channel)

        async def generate(n: int) -> int:
            flags = "01" if n % TRACED_SHARE == 0 else "00"
            metadata = (("traceparent", f"00-{n + 1:032x}-{n + 1:016x}-{flags}"),)
            prompt = [5 + (n * k) % 1000 for k in range(1, PROMPT + 1)]
            sampling = SamplingParams(seed=n, max_tokens=OUTPUT, ignore_eos=True)
            request = WorkerServiceGenerateRequest(
                submit=Submit(request_id=f"r{n}", tenant=f"t{n % 50}", prompt_token_ids=prompt, sampling=sampling)
            )
            async with turns:
                return sum([len(answer.chunk.token_ids) async for answer in stub.Generate(request, metadata=metadata)])

        before_s = worker.cpu_s()
        tokens = sum(await asyncio.gather(*(generate(n) for n in range(requests))))
    assert tokens == requests * OUTPUT, "every request is answered in full"
    return tokens / (worker.cpu_s() - before_s)


async def pairs(off: Worker, on: Worker, *, count: int, requests: int, at_once: int) -> list[tuple[float, float]]:
    """Output tokens per second of CPU time, without and with observation; a first pair is dropped. The order changes
    from pair to pair, so that a machine that becomes slower is no worker's fault."""
    found = []
    for n in range(count + 1):
        rates = {worker: 0.0 for worker in ((off, on), (on, off))[n % 2]}
        for worker in rates:
            rates[worker] = await tokens_per_cpu_s(worker, requests, at_once)
        found.append((rates[off], rates[on]))
    return found[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--against", type=Path, default=REPOSITORY, help="checkout of the worker that is not observed")
    parser.add_argument("--output", type=Path, default=REPOSITORY / "bench" / "results")
    arguments = parser.parse_args()
    found = facts(make_command("bench-observation", sys.argv[1:]), "one thread for each engine", ("trunkline",))
    lines = [
        "# What traces and metrics cost a worker\n",
        listed(found)
        + f"- {arguments.requests} requests of {PROMPT} and {OUTPUT} tokens; medians of {arguments.pairs} pairs\n",
        "| requests at once | tokens per CPU second, off | on | on / off |",
        "|---|---|---|---|",
    ]
    with receiver() as collector, running(arguments.against, None) as off, running(REPOSITORY, collector) as on:
        for at_once in (1, 8, 32):
            rates = asyncio.run(pairs(off, on, count=arguments.pairs, requests=arguments.requests, at_once=at_once))
            without, observed = (statistics.median(column) for column in zip(*rates, strict=True))
            ratio = statistics.median(observed / without for without, observed in rates)
            lines.append(f"| {at_once} | {without:,.0f} | {observed:,.0f} | {ratio:.3f} |")
    text = "\n".join(lines) + "\n"
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / f"observation-{found['date']}.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()

"""What observation costs a worker.

Two real workers compute the same requests in turn: one exports nothing; of the other, metrics are scraped every second
and a tenth of the requests is traced to an OTLP receiver. CPU time is compared, of front and engine together, because
it depends little on what else the machine does. Each pair has workers of its own: two equal processes may differ for as
long as they live.
"""

import asyncio
import os
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc

from trunkline.v1.generation_pb2 import SamplingParams
from trunkline.v1.worker_pb2 import GetModelRequest, Submit, WorkerServiceGenerateRequest
from trunkline.v1.worker_pb2_grpc import WorkerServiceStub
from trunkline_bench.observation.cost_pairs import Pair, Pairs
from trunkline_bench.observation.receiver import receiver
from trunkline_bench.servers.cpu_time import cpu_s
from trunkline_bench.servers.demo_model import DEMO_MODEL
from trunkline_bench.servers.ports import free_port

REPOSITORY = Path(__file__).parents[3]
PACKAGES = ("protos", "kernels", "worker", "router")
START_TIMEOUT_S = 60.0
TRACED_SHARE = 10  # one of so many requests
PROMPT, OUTPUT = 32, 128
AT_ONCE = (1, 8, 32)
WARM_UP_REQUESTS = 8


@dataclass(frozen=True, slots=True, eq=False)
class Worker:
    """A running worker."""

    process: subprocess.Popen[bytes]
    address: str
    metrics_port: int | None

    def cpu_s(self) -> float:
        """CPU time of the front and its engine since their start."""
        pid = self.process.pid
        children = [each for of in Path(f"/proc/{pid}/task").glob("*/children") for each in of.read_text().split()]
        return cpu_s(pid) + sum(cpu_s(int(child)) for child in children)


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


async def pair(off: Worker, on: Worker, requests: int, at_once: int, *, on_first: bool) -> Pair:
    """One run on each worker."""
    rates = {worker: 0.0 for worker in ((on, off) if on_first else (off, on))}
    for worker in rates:
        rates[worker] = await tokens_per_cpu_s(worker, requests, at_once)
    return Pair(off=rates[off], on=rates[on])


async def measured(count: int, requests: int, against: Path | None) -> Pairs:
    """Pairs by the number of requests at once. Each begins with a short run, which is dropped. The order changes from
    pair to pair, so that a machine that becomes slower is no worker's fault."""
    pairs: Pairs = {f"output tokens, {at_once} requests at once": [] for at_once in AT_ONCE}
    for number in range(count):
        with receiver() as collector, running(against or REPOSITORY, None) as off, running(REPOSITORY, collector) as on:
            await pair(off, on, WARM_UP_REQUESTS, WARM_UP_REQUESTS, on_first=bool(number % 2))
            for at_once, (name, taken) in zip(AT_ONCE, pairs.items(), strict=True):
                taken.append(one := await pair(off, on, requests, at_once, on_first=bool(number % 2)))
                print(f"{number + 1}. {name}: {one.ratio:.3f}", flush=True)
    return pairs

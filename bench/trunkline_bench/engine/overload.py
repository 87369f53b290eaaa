"""`make bench-overload`: ten times more requests than a real worker can serve: how fast it refuses, and the latency of
the requests that it accepts.

The worker process runs the demo model on one core. This process is its router, over one session.
"""

import argparse
import asyncio
import gc
import random
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from trunkline.v1.generation_pb2 import SamplingParams
from trunkline.v1.worker_pb2 import GetModelRequest, SessionHello, SessionRequest, Submit
from trunkline.v1.worker_pb2_grpc import WorkerServiceStub
from trunkline_bench.reports.markdown import listed, table
from trunkline_bench.reports.provenance import facts, make_command
from trunkline_bench.reports.statistics import percentile
from trunkline_bench.servers.demo_model import DEMO_MODEL
from trunkline_bench.servers.ports import free_port

REPOSITORY = Path(__file__).parents[3]
PROMPT, OUTPUT = 64, 96
MAX_WAITING = 64
CAPACITY_CONCURRENCY = 64
START_TIMEOUT_S = 60.0
TICK_S = 0.005


@dataclass(slots=True)
class Seen:
    """The worker's answers."""

    sent_s: dict[int, float] = field(default_factory=dict)
    refused_after_s: list[float] = field(default_factory=list)
    hints_s: list[float] = field(default_factory=list)
    ttft_s: list[tuple[float, float]] = field(default_factory=list)  # (when sent, time to first token)
    finished: int = 0
    started: set[int] = field(default_factory=set)
    other_errors: list[str] = field(default_factory=list)


class Session:
    """A router's stream to the worker."""

    def __init__(self, stub: Any, seen: Seen) -> None:
        self._outgoing: asyncio.Queue[SessionRequest] = asyncio.Queue()
        self._seen = seen
        self._call = stub.Session(self._requests())
        self.done = asyncio.Event()  # set when a request finishes
        self._reading = asyncio.create_task(self._read())

    def submit(self, handle: int, draw: random.Random) -> None:
        sampling = SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True, seed=0)
        prompt = [draw.randrange(500) for _ in range(PROMPT)]
        self._seen.sent_s[handle] = time.perf_counter()
        submit = Submit(handle=handle, prompt_token_ids=prompt, sampling=sampling)
        self._outgoing.put_nowait(SessionRequest(submits=[submit]))

    def close(self) -> None:
        self._reading.cancel()
        self._call.cancel()

    async def _requests(self) -> AsyncIterator[SessionRequest]:
        yield SessionRequest(hello=SessionHello(router_id="bench"))
        while True:
            yield await self._outgoing.get()

    async def _read(self) -> None:
        seen = self._seen
        async for response in self._call:
            now_s = time.perf_counter()
            for output in response.outputs:
                sent_s = seen.sent_s[output.handle]
                if output.HasField("error"):
                    if output.error.reason == "OVERLOADED":
                        seen.refused_after_s.append(now_s - sent_s)
                        seen.hints_s.append(output.error.retry_delay_ms / 1e3)
                    else:
                        seen.other_errors.append(output.error.reason)
                    continue
                if output.handle not in seen.started:
                    seen.started.add(output.handle)
                    seen.ttft_s.append((sent_s, now_s - sent_s))
                if output.chunk.finish_reason:
                    seen.finished += 1
                    self.done.set()


async def measure(address: str, seconds: float) -> tuple[float, Seen]:
    """Returns the capacity in requests per second, and the answers to ten times as many requests."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = WorkerServiceStub(channel)
        await stub.GetModel(GetModelRequest(), wait_for_ready=True, timeout=START_TIMEOUT_S)
        capacity = await closed_loop(stub, seconds / 2)
        gc.collect()
        gc.disable()  # a garbage collection here would count as the worker's latency
        draw, seen = random.Random(1), Seen()
        session = Session(stub, seen)
        started_s, sent = time.perf_counter(), 0
        while (now_s := time.perf_counter() - started_s) < seconds:
            while sent < 10 * capacity * now_s:
                session.submit(sent, draw)
                sent += 1
            await asyncio.sleep(TICK_S)
        while seen.finished + len(seen.refused_after_s) + len(seen.other_errors) < sent:
            session.done.clear()
            await asyncio.wait_for(session.done.wait(), START_TIMEOUT_S)
        session.close()
        return capacity, seen


async def closed_loop(stub: Any, seconds: float) -> float:
    """Requests per second with as many requests in flight as the worker runs at once."""
    draw, seen = random.Random(0), Seen()
    session = Session(stub, seen)
    sent = 0
    started_s = time.perf_counter()
    while time.perf_counter() - started_s < seconds:
        while sent - seen.finished - len(seen.refused_after_s) < CAPACITY_CONCURRENCY:
            session.submit(sent, draw)
            sent += 1
        session.done.clear()
        await session.done.wait()
    rate = seen.finished / (time.perf_counter() - started_s)
    session.close()
    return rate


def report(capacity: float, seen: Seen, seconds: float) -> str:
    begin_s = min(seen.sent_s.values())
    halves: list[list[float]] = [[], []]
    for sent_s, ttft_s in seen.ttft_s:
        halves[sent_s - begin_s >= seconds / 2].append(ttft_s)
    refused_ms = [value * 1e3 for value in seen.refused_after_s]
    rows = {
        "capacity": [f"{capacity:.1f} requests/s of {PROMPT} + {OUTPUT} tokens"],
        "offered": [f"{len(seen.sent_s) / seconds:.1f} requests/s for {seconds:.0f} s"],
        "accepted and finished / refused / other errors": [
            f"{seen.finished:,} / {len(refused_ms):,} / {len(seen.other_errors)}"
        ],
        "refusal p50 / p99 / max": [
            f"{percentile(refused_ms, 0.5):.2f} / {percentile(refused_ms, 0.99):.2f} / {max(refused_ms):.2f} ms"
        ],
        "TTFT p50 / p99 of the accepted, first half": [
            f"{percentile(halves[0], 0.5):.2f} / {percentile(halves[0], 0.99):.2f} s"
        ],
        "TTFT p50 / p99 of the accepted, second half": [
            f"{percentile(halves[1], 0.5):.2f} / {percentile(halves[1], 0.99):.2f} s"
        ],
        "retry hint, median": [f"{statistics.median(seen.hints_s):.2f} s"],
        "queue bound / capacity, which the hint should equal": [f"{MAX_WAITING / capacity:.2f} s"],
    }
    return table(rows, ("measured",))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--output", type=Path, default=REPOSITORY / "bench" / "results")
    arguments = parser.parse_args()
    flags = ["--seconds", f"{arguments.seconds:g}"]
    machine = "engine on one, its front and this load on the other"
    found = facts(make_command("bench-overload", flags), machine, ("trunkline", "torch", "grpcio"))
    port = free_port()
    command = [
        str(Path(sys.executable).with_name("trunkline-worker")), "--model", str(DEMO_MODEL), "--port", str(port),
        "--threads", "1", "--device", "cpu", "--max-waiting-requests", str(MAX_WAITING),
        "--max-running-requests", str(CAPACITY_CONCURRENCY), "--interactive-reserve", "0",
    ]  # fmt: skip
    worker = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        capacity, seen = asyncio.run(measure(f"127.0.0.1:{port}", arguments.seconds))
    finally:
        worker.terminate()
        worker.wait()
    text = (
        "# Ten times the capacity of a real worker\n\n"
        + listed(found)
        + f"- model: {DEMO_MODEL.name}, queue bound {MAX_WAITING}\n\n"
        + report(capacity, seen, arguments.seconds)
    )
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / f"overload-{found['date']}.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()

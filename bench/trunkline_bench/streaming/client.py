"""A load of concurrent streams, which decode as little of the answers as possible.

usage: python -m trunkline_bench.streaming.client '{"address": "127.0.0.1:50051", "wire": "edge", ...}'     (see Load)

Prints a Seen as JSON. Without an argument it reads a load from each line of its standard input, and prints one a line.
"""

import asyncio
import gc
import json
import resource
import sys
import time
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import grpc
import uvloop

from trunkline_bench.reports.statistics import percentile
from trunkline_bench.streaming.source import DEFAULT_MODEL
from trunkline_bench.streaming.wires import Ask, Call, Wire, wire_named

MOST_LOGPROBS = 20


@dataclass(frozen=True, slots=True)
class Load:
    """`streams` concurrent streams, each of `rounds` requests one after another.

    wire: one of WIRES; steps_per_s: rate of a paced source, for which the age of every token is recorded; stalled:
    number of streams that also ask for log-probabilities, read one response, and read on only when the others are done
    (gRPC wires only); model: that HTTP requests name
    """

    address: str
    wire: str
    streams: int
    max_tokens: int
    prompt_tokens: int = 32
    text: bool = False
    rounds: int = 1
    steps_per_s: float = 0.0
    stalled: int = 0
    model: str = DEFAULT_MODEL


@dataclass(slots=True)
class Seen:
    seconds: float = 0.0
    cpu_s: float = 0.0  # of this process
    messages: int = 0
    tokens: int = 0
    requests: int = 0
    stalled_ended: list[str] = field(default_factory=list)  # error statuses of stalled streams
    # Age of tokens, if the source is paced
    age_p50_ms: float = 0.0
    age_p99_ms: float = 0.0


def ask(load: Load, stream: int) -> Ask:
    ids = [(stream * 7 + place * 3) % 500 for place in range(load.prompt_tokens)]
    return Ask(ids, load.max_tokens, text=load.text, model=load.model)


async def run(load: Load) -> Seen:
    seen = Seen()
    wire = wire_named(load.wire)
    async with wire.open(load.address) as connect:
        calls = [connect() for _ in range(load.streams)]
        gc.collect()
        gc.freeze()
        others_done = asyncio.Event()
        stalling = [asyncio.create_task(stall(load, wire, call, seen, others_done)) for call in calls[: load.stalled]]
        started_s, started_cpu_s = time.monotonic(), cpu_s()
        ages_ms: list[float] = []
        async with asyncio.TaskGroup() as group:
            for stream in range(load.stalled, load.streams):
                group.create_task(read(load, wire, calls[stream], stream, seen, ages_ms))
        seen.seconds, seen.cpu_s = time.monotonic() - started_s, cpu_s() - started_cpu_s
        seen.age_p50_ms, seen.age_p99_ms = percentile(ages_ms, 0.5), percentile(ages_ms, 0.99)
        others_done.set()
        await asyncio.gather(*stalling)
    return seen


async def read(load: Load, wire: Wire, call: Call, stream: int, seen: Seen, ages_ms: list[float]) -> None:
    request = wire.request(ask(load, stream))
    for _ in range(load.rounds):
        response, messages = b"", 0
        async for response in call(request):
            messages += 1
            if load.steps_per_s:
                ages_ms.extend(wire.ages_ms(response, time.monotonic(), load.steps_per_s))
        wire.check_last(response, load.max_tokens)
        seen.messages += messages
        seen.requests += 1
        seen.tokens += load.max_tokens


async def stall(load: Load, wire: Wire, call: Call, seen: Seen, others_done: asyncio.Event) -> None:
    reading: Any = call(wire.request(replace(ask(load, 0), logprobs=MOST_LOGPROBS)))
    await reading.read()
    await others_done.wait()
    try:
        while await reading.read() is not grpc.aio.EOF:
            pass
    except grpc.aio.AioRpcError as error:
        seen.stalled_ended.append(error.code().name)


def cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    for load in sys.argv[1:] or sys.stdin:
        print(json.dumps(asdict(uvloop.run(run(Load(**json.loads(load)))))), flush=True)


if __name__ == "__main__":
    main()

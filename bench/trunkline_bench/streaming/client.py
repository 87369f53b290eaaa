"""A load: streams that read whatever comes, taking as little of it apart as they can.

usage: python -m trunkline_bench.streaming.client '{"address": "127.0.0.1:50051", "edge": true, ...}'     (see Load)

Prints a Seen as JSON.
"""

import asyncio
import gc
import json
import resource
import sys
import time
from dataclasses import asdict, dataclass, field
from typing import Any

import grpc
import uvloop

from trunkline.v1.generation_pb2 import SamplingParams
from trunkline.v1.inference_pb2 import GenerateRequest, GenerateResponse, TokenIds
from trunkline.v1.worker_pb2 import Submit, WorkerServiceGenerateRequest, WorkerServiceGenerateResponse
from trunkline_bench.simulation.report import percentile
from trunkline_bench.streaming.source import STAMP_DIGITS
from trunkline_runtime.channel import open_channel

EDGE, WORKER = "/trunkline.v1.InferenceService/Generate", "/trunkline.v1.WorkerService/Generate"
MOST_LOGPROBS = 20

Method = Any  # a grpc.aio.UnaryStreamMultiCallable[bytes, bytes]: generic in its stubs alone


@dataclass(frozen=True, slots=True)
class Load:
    """So many streams at once, each of `rounds` requests one after the other.

    edge: speaks to a router; else to a worker, or what passes its bytes on. latency: notes the age of every token.
    stalled: so many of the streams ask for log-probabilities too, read one response, and no more until the others are
    done.
    """

    address: str
    edge: bool
    streams: int
    max_tokens: int
    prompt_tokens: int = 32
    text: bool = False
    rounds: int = 1
    latency: bool = False
    stalled: int = 0


@dataclass(slots=True)
class Seen:
    seconds: float = 0.0
    cpu_s: float = 0.0  # of this process
    messages: int = 0
    tokens: int = 0
    requests: int = 0
    stalled_ended: list[str] = field(default_factory=list)  # statuses of stalled streams that did not end well
    # Of tokens, where latency was asked for
    age_p50_ms: float = 0.0
    age_p99_ms: float = 0.0


def request_bytes(load: Load, stream: int, *, logprobs: int | None = None) -> bytes:
    prompt = [(stream * 7 + place * 3) % 500 for place in range(load.prompt_tokens)]
    sampling = SamplingParams(max_tokens=load.max_tokens, ignore_eos=True, temperature=0, seed=1, logprobs=logprobs)
    if not load.edge:
        submit = Submit(prompt_token_ids=prompt, sampling=sampling)
        return WorkerServiceGenerateRequest(submit=submit).SerializeToString()
    if load.text:
        return GenerateRequest(text="Once upon a time there was a " * 4, sampling=sampling).SerializeToString()
    return GenerateRequest(token_ids=TokenIds(ids=prompt), sampling=sampling).SerializeToString()


def text_of(load: Load, response: bytes) -> str:
    if load.edge:
        return GenerateResponse.FromString(response).chunks[0].text
    return WorkerServiceGenerateResponse.FromString(response).chunk.text


def check_last(load: Load, response: bytes) -> None:
    """That a stream ended as it should: with all of its tokens."""
    if load.edge:
        last = GenerateResponse.FromString(response)
        assert last.usage.completion_tokens == load.max_tokens, last
        chunk = last.chunks[0]
    else:
        chunk = WorkerServiceGenerateResponse.FromString(response).chunk
    assert chunk.finish_reason
    assert chunk.first_token_index + len(chunk.token_ids) == load.max_tokens, chunk


async def run(load: Load) -> Seen:
    seen = Seen()
    async with open_channel(load.address) as channel:
        await channel.channel_ready()
        generate: Method = channel.unary_stream(EDGE if load.edge else WORKER)
        gc.collect()
        gc.freeze()
        others_done = asyncio.Event()
        stalling = [asyncio.create_task(stall(load, generate, seen, others_done)) for _ in range(load.stalled)]
        started_s, started_cpu_s = time.monotonic(), cpu_s()
        ages_ms: list[float] = []
        async with asyncio.TaskGroup() as group:
            for stream in range(load.stalled, load.streams):
                group.create_task(read(load, generate, stream, seen, ages_ms))
        seen.seconds, seen.cpu_s = time.monotonic() - started_s, cpu_s() - started_cpu_s
        seen.age_p50_ms, seen.age_p99_ms = percentile(ages_ms, 0.5), percentile(ages_ms, 0.99)
        others_done.set()
        await asyncio.gather(*stalling)
    return seen


async def read(load: Load, generate: Method, stream: int, seen: Seen, ages_ms: list[float]) -> None:
    request = request_bytes(load, stream)
    for _ in range(load.rounds):
        call = generate(request)
        response, messages = b"", 0
        async for response in call:
            messages += 1
            if load.latency:
                now_us, text = time.monotonic_ns() // 1000, text_of(load, response)
                for at in range(0, len(text), STAMP_DIGITS):
                    ages_ms.append((now_us - int(text[at : at + STAMP_DIGITS])) / 1e3)
        check_last(load, response)
        seen.messages += messages
        seen.requests += 1
        seen.tokens += load.max_tokens


async def stall(load: Load, generate: Method, seen: Seen, others_done: asyncio.Event) -> None:
    call = generate(request_bytes(load, 0, logprobs=MOST_LOGPROBS))
    await call.read()
    await others_done.wait()
    try:
        while await call.read() is not grpc.aio.EOF:
            pass
    except grpc.aio.AioRpcError as error:
        seen.stalled_ended.append(error.code().name)


def cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    print(json.dumps(asdict(uvloop.run(run(Load(**json.loads(sys.argv[1])))))))


if __name__ == "__main__":
    main()

"""A worker that computes nothing: each step yields a token for every open choice.

usage: python -m trunkline_bench.streaming.source [--steps-per-s 20]     (prints its port)

Its answers have exactly `max_tokens` tokens. The text of a token is the time at which its step was due, so that clients
can compute the token's age. The environment variable MODEL is the model's name (default: source), and ANSWER_FORMAT
the format of its answers.
"""

import argparse
import asyncio
import contextlib
import json
import os
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import uvloop

from trunkline.channel import KEEPALIVE_MS, MESSAGE_OPTIONS
from trunkline.protocol import PROTOCOL_VERSION
from trunkline.v1.generation_pb2 import FinishReason, OutputChunk, PromptReport, TokenLogprob, TokenLogprobs
from trunkline.v1.worker_pb2 import (
    CacheSnapshot,
    GetModelResponse,
    GetStatsResponse,
    GetTokenizerResponse,
    LoadSample,
    SequenceOutput,
    SessionResponse,
    SessionWelcome,
    Submit,
    WatchCacheResponse,
    WorkerServiceGenerateResponse,
)
from trunkline.v1.worker_pb2_grpc import WorkerServiceServicer, add_WorkerServiceServicer_to_server
from trunkline_bench.servers.demo_model import DEMO_MODEL

DEFAULT_MODEL = "source"
STAMP_DIGITS = 16  # for microseconds of the monotonic clock, which all processes of a machine share
LOAD_INTERVAL_S = 0.05
PIECE_BYTES = 1 << 20
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
LONG = 1 << 22  # tokens; no request of the benchmark exceeds this
EPOCH = 1
# As our servers, but without an interceptor.
SERVER_OPTIONS = (
    *MESSAGE_OPTIONS,
    ("grpc.so_reuseport", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_MS // 2),
    ("grpc.http2.max_ping_strikes", 0),
)


def stamp(step_s: float) -> str:
    """The text of a token: its step's time in microseconds."""
    return f"{int(step_s * 1e6):0{STAMP_DIGITS}d}"


class Choice:
    """The progress of one submit."""

    __slots__ = ("handle", "index", "logprobs", "max_tokens", "prompt_tokens", "sent")

    def __init__(self, submit: Submit) -> None:
        self.handle = submit.handle
        self.index = submit.choice
        self.max_tokens = submit.sampling.max_tokens
        self.prompt_tokens = len(submit.prompt_token_ids)
        self.logprobs = [_logprobs(submit.sampling.logprobs)] if submit.sampling.HasField("logprobs") else None
        self.sent = 0

    @property
    def ended(self) -> bool:
        return self.sent == self.max_tokens

    def next_chunk(self, text: str) -> OutputChunk:
        sent = self.sent
        self.sent += 1
        return OutputChunk(
            index=self.index,
            first_token_index=sent,
            token_ids=(sent % 500,),
            text=text,
            text_offset=sent * STAMP_DIGITS,
            logprobs=self.logprobs,
            finish_reason=FinishReason.FINISH_REASON_LENGTH if self.ended else 0,  # type: ignore[arg-type]
        )

    def report(self) -> PromptReport | None:
        """The prompt report, which belongs to the first chunk; None for later ones."""
        return PromptReport(prompt_tokens=self.prompt_tokens) if not self.sent else None


def _logprobs(top: int) -> TokenLogprobs:
    entry = TokenLogprob(token_id=400, logprob=-0.25, rank=1)
    return TokenLogprobs(chosen=entry, top=[entry] * top)


class Pace:
    """Steps at fixed times, which all streams of this process share, as in a worker.

    Without a rate, a step is always due at once.
    """

    def __init__(self, steps_per_s: float) -> None:
        self._interval_s = 1 / steps_per_s if steps_per_s else 0.0
        self._step = 0

    async def next_step(self) -> float:
        """Waits for the next step. Returns the monotonic time at which it was due."""
        now_s = time.monotonic()
        if not self._interval_s:
            return now_s
        self._step = max(self._step, int(now_s / self._interval_s)) + 1  # a timer may fire early
        due_s = self._step * self._interval_s
        await asyncio.sleep(due_s - now_s)
        return due_s


class Source(WorkerServiceServicer):
    def __init__(self, steps_per_s: float) -> None:
        self._steps_per_s = steps_per_s
        self._files = {name: (DEMO_MODEL / name).read_bytes() for name in TOKENIZER_FILES}
        self._vocab_size: int = json.loads((DEMO_MODEL / "config.json").read_text())["vocab_size"]

    async def Session(self, request_iterator: AsyncIterator[Any], context: Any) -> None:  # type: ignore[override]  # it writes
        open_choices: dict[int, Choice] = {}
        arrived = asyncio.Event()
        pace = Pace(self._steps_per_s)

        async def read() -> None:
            async for request in request_iterator:
                for submit in request.submits:
                    open_choices[submit.handle] = Choice(submit)
                for handle in request.abort_handles:
                    open_choices.pop(handle, None)
                arrived.set()

        reading = asyncio.create_task(read())
        try:
            await context.write(SessionResponse(welcome=SessionWelcome(worker_id="source", epoch=EPOCH)))
            while True:
                if not open_choices:
                    arrived.clear()
                    await arrived.wait()
                text = stamp(await pace.next_step())
                outputs = []
                for choice in list(open_choices.values()):
                    report = choice.report()
                    outputs.append(SequenceOutput(handle=choice.handle, chunk=choice.next_chunk(text), prompt=report))
                    if choice.ended:
                        del open_choices[choice.handle]
                await context.write(SessionResponse(outputs=outputs))
        finally:
            reading.cancel()

    async def Generate(self, request: Any, context: Any) -> None:  # type: ignore[override]  # likewise
        choice, pace = Choice(request.submit), Pace(self._steps_per_s)
        while not choice.ended:
            text, report = stamp(await pace.next_step()), choice.report()
            await context.write(WorkerServiceGenerateResponse(chunk=choice.next_chunk(text), prompt=report))

    async def WatchCache(self, request: Any, context: Any) -> AsyncIterator[WatchCacheResponse]:
        yield WatchCacheResponse(epoch=EPOCH, snapshot=CacheSnapshot(first=True, last=True))
        while True:
            await asyncio.sleep(LOAD_INTERVAL_S)
            yield WatchCacheResponse(epoch=EPOCH, load=LoadSample(kv_free_blocks=LONG // 16))

    async def GetModel(self, request: Any, context: Any) -> GetModelResponse:
        return GetModelResponse(
            model=os.environ.get("MODEL", DEFAULT_MODEL),
            worker_id="source",
            epoch=EPOCH,
            protocol_version=PROTOCOL_VERSION,
            fingerprint="source",
            vocab_size=self._vocab_size,
            context_length=LONG,
            kv_token_capacity=LONG,
            block_size=16,
            kv_blocks=LONG // 16,
            max_step_tokens=8192,
            max_running_requests=1024,
            tokenizer_digest=b"demo",
            answer_format=os.environ.get("ANSWER_FORMAT", ""),
        )

    async def GetStats(self, request: Any, context: Any) -> GetStatsResponse:
        return GetStatsResponse(load=LoadSample(kv_free_blocks=LONG // 16))

    async def GetTokenizer(self, request: Any, context: Any) -> AsyncIterator[GetTokenizerResponse]:
        for name, data in self._files.items():
            for start in range(0, len(data), PIECE_BYTES):
                yield GetTokenizerResponse(name=name, data=data[start : start + PIECE_BYTES])


AddTo = Callable[[grpc.aio.Server, float], None]  # adds a source to a server: (server, steps_per_s)


async def serve(add_to: AddTo, steps_per_s: float) -> None:
    server = grpc.aio.server(options=SERVER_OPTIONS)
    add_to(server, steps_per_s)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    await server.wait_for_termination()


def main(description: str | None, add_to: AddTo) -> None:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--steps-per-s", type=float, default=0.0)
    with contextlib.suppress(KeyboardInterrupt):
        uvloop.run(serve(add_to, parser.parse_args().steps_per_s))


def add_source(server: grpc.aio.Server, steps_per_s: float) -> None:
    source = Source(steps_per_s)  # type: ignore[abstract]  # Drain is not called
    add_WorkerServiceServicer_to_server(source, server)


if __name__ == "__main__":
    main(__doc__, add_source)

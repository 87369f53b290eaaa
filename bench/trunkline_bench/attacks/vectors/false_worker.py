"""A worker without a model, as a process. It describes itself as a real worker does, except for one lie.

usage: python -m trunkline_bench.attacks.vectors.false_worker --port 50062 --of 127.0.0.1:50061 [--lie NAME] [--model M]

It answers requests at once with meaningless tokens. Without a lie it answers as fast as the router reads, with
log-probabilities if they are requested.
"""

import argparse
import asyncio
import secrets
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import grpc
import uvloop

from trunkline.channel import MESSAGE_OPTIONS
from trunkline.tokenizer_digest import tokenizer_digest
from trunkline.v1.generation_pb2 import FinishReason, OutputChunk, PromptReport, TokenLogprob, TokenLogprobs
from trunkline.v1.worker_pb2 import (
    CacheSnapshot,
    GetModelRequest,
    GetModelResponse,
    GetTokenizerRequest,
    GetTokenizerResponse,
    SequenceOutput,
    SessionResponse,
    SessionWelcome,
    Submit,
    WatchCacheResponse,
)
from trunkline.v1.worker_pb2_grpc import WorkerServiceServicer, WorkerServiceStub, add_WorkerServiceServicer_to_server
from trunkline_bench.attacks.vectors.lies import LIES, PIECE_BYTES, Files, Lie
from trunkline_runtime.server import GrpcServer

SERVICE = "trunkline.v1.WorkerService"
LISTENING, ASKED = "false worker listening", "a router asks for the model"  # printed
TOKEN = 5
PIECE_TOKENS = 32
ANSWERS_AT_ONCE = 16  # with tokens in one message
START_S = 60.0


@cache
def _piece(count: int, num_logprobs: int | None) -> OutputChunk:
    """A chunk of `count` tokens with `num_logprobs` top log-probabilities each; None: no log-probabilities."""
    chunk = OutputChunk(token_ids=[TOKEN] * count, text="x" * count)
    if num_logprobs is not None:
        one = TokenLogprob(token_id=TOKEN, logprob=-1.5, rank=1)
        chunk.logprobs.extend([TokenLogprobs(chosen=one, top=[one] * num_logprobs)] * count)
    return chunk


@dataclass(slots=True)
class Answer:
    """An answer in progress. `sent`: tokens so far."""

    submit: Submit
    sent: int = 0

    @property
    def length(self) -> int:
        return self.submit.sampling.max_tokens or 1

    def next_output(self) -> SequenceOutput:
        """Up to PIECE_TOKENS further tokens, with the finish reason after the last one."""
        count = min(PIECE_TOKENS, self.length - self.sent)
        chunk = OutputChunk()
        num_logprobs = self.submit.sampling.logprobs if self.submit.sampling.HasField("logprobs") else None
        chunk.CopyFrom(_piece(count, num_logprobs))
        chunk.index, chunk.first_token_index, chunk.text_offset = self.submit.choice, self.sent, self.sent
        output = SequenceOutput(handle=self.submit.handle, chunk=chunk)
        if not self.sent:
            output.prompt.CopyFrom(PromptReport(prompt_tokens=len(self.submit.prompt_token_ids)))
        self.sent += count
        if self.sent == self.length:
            output.chunk.finish_reason = FinishReason.FINISH_REASON_LENGTH
        return output


@dataclass(slots=True)
class Open:
    """A session: the answers in progress, which take turns, and the outputs that a lie makes."""

    answers: deque[Answer] = field(default_factory=deque)
    said: deque[SequenceOutput] = field(default_factory=deque)
    aborted: set[int] = field(default_factory=set)
    wake: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass
class FalseWorker(WorkerServiceServicer):
    description: GetModelResponse
    files: Files
    lie: Lie

    async def Session(self, request_iterator: AsyncIterator[Any], context: Any) -> AsyncIterator[SessionResponse]:
        session = Open()
        reading = asyncio.create_task(self._read(request_iterator, session))
        try:
            yield SessionResponse(
                welcome=SessionWelcome(worker_id=self.description.worker_id, epoch=self.description.epoch)
            )
            while True:
                if not (session.answers or session.said or self.lie.flood):
                    session.wake.clear()
                    await session.wake.wait()
                outputs = [session.said.popleft() for _ in range(len(session.said))]
                for _ in range(min(ANSWERS_AT_ONCE, len(session.answers))):
                    answer = session.answers.popleft()
                    if answer.submit.handle not in session.aborted:
                        outputs.append(answer.next_output())
                        if answer.sent < answer.length:
                            session.answers.append(answer)
                if self.lie.flood:
                    outputs += self.lie.flood()
                yield SessionResponse(outputs=outputs)
                await asyncio.sleep(0)
        finally:
            reading.cancel()

    async def _read(self, requests: AsyncIterator[Any], session: Open) -> None:
        async for request in requests:
            for submit in request.submits:
                if self.lie.output is not None:
                    session.said.extend(self.lie.output(submit))
                else:
                    session.answers.append(Answer(submit, len(submit.resume.output_token_ids)))
            session.aborted.update(request.abort_handles)
            session.wake.set()

    async def WatchCache(self, request: Any, context: Any) -> AsyncIterator[WatchCacheResponse]:
        epoch = self.description.epoch
        yield WatchCacheResponse(epoch=epoch, sequence=0, snapshot=CacheSnapshot(first=True, last=True))
        if self.lie.load is not None:
            yield WatchCacheResponse(epoch=epoch, sequence=0, load=self.lie.load())
        if self.lie.cache is not None:
            for item in self.lie.cache(epoch, 0):
                yield item
                await asyncio.sleep(0)
        await asyncio.Event().wait()

    async def GetModel(self, request: Any, context: Any) -> GetModelResponse:
        print(ASKED, flush=True)
        return self.description

    async def GetTokenizer(self, request: Any, context: Any) -> AsyncIterator[GetTokenizerResponse]:
        if self.lie.tokenizer == "hangs":
            await asyncio.Event().wait()
        for name, data in self.files.items():
            for start in range(0, max(1, len(data)), PIECE_BYTES):
                yield GetTokenizerResponse(name=name, data=data[start : start + PIECE_BYTES])
        while self.lie.tokenizer == "floods":
            yield GetTokenizerResponse(name="tokenizer.json", data=bytes(PIECE_BYTES))


async def beside(address: str, lie: Lie, port: int, model: str) -> FalseWorker:
    """A false worker with the description of the worker at `address`, except for the lie and, if given, the model."""
    files: dict[str, bytearray] = {}
    async with grpc.aio.insecure_channel(address, options=MESSAGE_OPTIONS) as channel:
        stub: Any = WorkerServiceStub(channel)
        description = await stub.GetModel(GetModelRequest(), wait_for_ready=True, timeout=START_S)
        async for piece in stub.GetTokenizer(GetTokenizerRequest(), timeout=START_S):
            files.setdefault(piece.name, bytearray()).extend(piece.data)
    description.ClearField("grant_key_ids")
    if not lie.copies:
        description.worker_id, description.epoch = f"127.0.0.1:{port}", secrets.randbits(64)
    if model:
        description.model = description.fingerprint = model
    told = {name: bytes(data) for name, data in files.items()}
    if callable(lie.tokenizer):
        told = lie.tokenizer(told)
        description.tokenizer_digest = tokenizer_digest(told)
    elif lie.tokenizer is not None:
        description.tokenizer_digest = secrets.token_bytes(16)  # unknown, so that routers fetch the files
    if lie.model is not None:
        lie.model(description)
    return FalseWorker(description, told, lie)  # type: ignore[abstract]  # methods that routers do not call


async def run(port: int, of: str, lie: Lie, model: str) -> None:
    worker = await beside(of, lie, port, model)
    server = GrpcServer("127.0.0.1", port, services=[SERVICE])
    add_WorkerServiceServicer_to_server(worker, server.grpc)
    await server.start()
    print(LISTENING, flush=True)
    await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--of", required=True, help="the real worker, as host:port")
    parser.add_argument("--lie", default="", choices=("", *LIES))
    parser.add_argument("--model", default="", help="served name; default: the real worker's model and weights")
    arguments = parser.parse_args()
    uvloop.run(run(arguments.port, arguments.of, LIES.get(arguments.lie, Lie()), arguments.model))


if __name__ == "__main__":
    main()

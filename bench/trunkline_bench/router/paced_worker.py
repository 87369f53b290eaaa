"""A worker without a model, as a process. It has a given speed, and schedules tenants as fairly as a real worker.

usage: python -m trunkline_bench.router.paced_worker --port 50061 [--model paced] [--rate 0]

It serves whole requests one after another at --rate tokens per second (0: at once), and chooses the next one by the
real worker's fair share. Its tokens are meaningless.

An answer without max_tokens has a log-normal length drawn from the request's seed, and is sent in pieces.
"""

import argparse
import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from random import Random
from typing import Any

import uvloop

from trunkline.protocol import PROTOCOL_VERSION
from trunkline.v1.generation_pb2 import FinishReason, OutputChunk, PromptReport
from trunkline.v1.worker_pb2 import (
    CacheSnapshot,
    GetModelResponse,
    GetTokenizerResponse,
    SequenceOutput,
    SessionResponse,
    SessionWelcome,
    Submit,
    WatchCacheResponse,
)
from trunkline.v1.worker_pb2_grpc import WorkerServiceServicer, add_WorkerServiceServicer_to_server
from trunkline_bench.servers.demo_model import DEMO_MODEL
from trunkline_runtime.server import GrpcServer
from trunkline_worker.step.fair_share import Account, Accounts
from trunkline_worker.step.lanes import Lane

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
PIECE_BYTES = 1 << 20
CONTEXT = 1 << 16
# Lengths of answers without max_tokens: 98 tokens on average; half of all tokens are in answers of more than 160.
LENGTH_MU, LENGTH_SIGMA, MOST_LENGTH = 4.1, 1.0, 4000
STEP_TOKENS, STEP_S = 16, 0.01


@dataclass(eq=False, slots=True)
class Waiting:
    """A submit, and the queue for its answer."""

    submit: Submit
    outbox: "asyncio.Queue[SessionResponse]"
    account: Account
    is_aborted: bool = False


@dataclass
class PacedWorker(WorkerServiceServicer):
    worker_id: str
    model: str
    rate: float  # prompt and output tokens per second, together; 0: no limit
    _accounts: Accounts = field(default_factory=lambda: Accounts(Lane.STANDARD))
    _queues: dict[str, deque[Waiting]] = field(default_factory=dict)  # by tenant
    _arrived: asyncio.Event = field(default_factory=asyncio.Event)
    _streaming: set[asyncio.Task[None]] = field(default_factory=set)

    async def serve(self) -> None:
        """Serves one request after another, without end."""
        free_at_s = time.monotonic()
        while True:
            account = self._accounts.next()
            if account is None:
                self._arrived.clear()
                await self._arrived.wait()
                free_at_s = max(free_at_s, time.monotonic())
                continue
            waiting = self._queues[account.tenant].popleft()
            self._accounts.step_out(account)
            self._accounts.leave(account, 1)
            if waiting.is_aborted:
                continue
            prompt, output = len(waiting.submit.prompt_token_ids), _length(waiting.submit)
            account.input_tokens += prompt
            account.output_tokens += output
            if self.rate:
                free_at_s += (prompt + output) / self.rate
                await asyncio.sleep(max(0.0, free_at_s - time.monotonic()))
            if waiting.submit.sampling.HasField("max_tokens"):
                waiting.outbox.put_nowait(SessionResponse(outputs=[_answer(waiting.submit, 0, output, output)]))
            else:
                streaming = asyncio.create_task(self._stream(waiting, output))
                self._streaming.add(streaming)
                streaming.add_done_callback(self._streaming.discard)

    async def _stream(self, waiting: Waiting, output: int) -> None:
        """Sends the answer piece by piece."""
        for start in range(0, output, STEP_TOKENS):
            if waiting.is_aborted:
                return
            end = min(output, start + STEP_TOKENS)
            waiting.outbox.put_nowait(SessionResponse(outputs=[_answer(waiting.submit, start, end, output)]))
            await asyncio.sleep(STEP_S)

    def _take(self, submit: Submit, outbox: "asyncio.Queue[SessionResponse]") -> Waiting:
        account = self._accounts.account(submit.tenant, submit.tenant_weight or 1.0)
        waiting = Waiting(submit, outbox, account)
        self._queues.setdefault(submit.tenant, deque()).append(waiting)
        self._accounts.join(account, 1)
        self._accounts.line_up(account)
        self._arrived.set()
        return waiting

    async def Session(self, request_iterator: AsyncIterator[Any], context: Any) -> AsyncIterator[SessionResponse]:
        outbox: asyncio.Queue[SessionResponse] = asyncio.Queue()
        reading = asyncio.create_task(self._read(request_iterator, outbox))
        try:
            yield SessionResponse(welcome=SessionWelcome(worker_id=self.worker_id, epoch=1))
            while True:
                response = await outbox.get()
                while not outbox.empty():
                    response.MergeFrom(outbox.get_nowait())
                yield response
        finally:
            reading.cancel()

    async def _read(self, requests: AsyncIterator[Any], outbox: "asyncio.Queue[SessionResponse]") -> None:
        open_ones: dict[int, Waiting] = {}
        async for request in requests:
            for submit in request.submits:
                open_ones[submit.handle] = self._take(submit, outbox)
            for handle in request.abort_handles:
                if handle in open_ones:
                    open_ones[handle].is_aborted = True

    async def WatchCache(self, request: Any, context: Any) -> AsyncIterator[WatchCacheResponse]:
        yield WatchCacheResponse(epoch=1, sequence=0, snapshot=CacheSnapshot(first=True, last=True))
        await asyncio.Event().wait()

    async def GetModel(self, request: Any, context: Any) -> GetModelResponse:
        return GetModelResponse(
            model=self.model,
            worker_id=self.worker_id,
            protocol_version=PROTOCOL_VERSION,
            epoch=1,
            fingerprint=self.model,
            architecture="Paced",
            vocab_size=2048,  # the tokenizer's
            context_length=CONTEXT,
            kv_token_capacity=CONTEXT,
            block_size=16,
            tokenizer_digest=b"tiny-tales",
        )

    async def GetTokenizer(self, request: Any, context: Any) -> AsyncIterator[GetTokenizerResponse]:
        for name in TOKENIZER_FILES:
            data = (DEMO_MODEL / name).read_bytes()
            for start in range(0, len(data), PIECE_BYTES):
                yield GetTokenizerResponse(name=name, data=data[start : start + PIECE_BYTES])


def _length(submit: Submit) -> int:
    """Tokens of the answer."""
    if submit.sampling.HasField("max_tokens"):
        return submit.sampling.max_tokens
    return min(MOST_LENGTH, 1 + int(Random(submit.sampling.seed).lognormvariate(LENGTH_MU, LENGTH_SIGMA)))


def _answer(submit: Submit, start: int, end: int, length: int) -> SequenceOutput:
    """The answer's tokens from `start` to `end`."""
    chunk = OutputChunk(
        index=submit.choice,
        first_token_index=start,
        token_ids=range(start, end),
        text="x" * (end - start),
        text_offset=start,
        finish_reason=FinishReason.FINISH_REASON_LENGTH if end == length else FinishReason.FINISH_REASON_UNSPECIFIED,
    )
    report = PromptReport(prompt_tokens=len(submit.prompt_token_ids)) if start == 0 else None
    return SequenceOutput(handle=submit.handle, chunk=chunk, prompt=report)


async def run(port: int, model: str, rate: float) -> None:
    server = GrpcServer("127.0.0.1", port, services=["trunkline.v1.WorkerService"])
    worker = PacedWorker(f"127.0.0.1:{port}", model, rate)  # type: ignore[abstract]  # methods that routers do not call
    add_WorkerServiceServicer_to_server(worker, server.grpc)
    await server.start()
    await worker.serve()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--model", default="paced")
    parser.add_argument("--rate", type=float, default=0.0)
    arguments = parser.parse_args()
    uvloop.run(run(arguments.port, arguments.model, arguments.rate))


if __name__ == "__main__":
    main()

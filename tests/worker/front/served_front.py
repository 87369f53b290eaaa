"""A worker's front on a free port, over an engine that answers each submit with one token at once."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc

from tests.worker.engine_rig import DEMO_MODEL
from trunkline.engine.v1.engine_pb2 import EngineOutput, EngineStep
from trunkline.grant import GrantKeys
from trunkline.v1.generation_pb2 import FinishReason
from trunkline.v1.worker_pb2 import GetModelResponse, GetStatsResponse, OutputKind, Submit
from trunkline_runtime.server import GrpcServer
from trunkline_worker.front.cache_mirror import CacheMirror
from trunkline_worker.front.door import CallAuthorizer, Door, most_message_bytes
from trunkline_worker.front.draining import Draining
from trunkline_worker.front.front import Front
from trunkline_worker.front.grants import GrantDesk
from trunkline_worker.front.service import SERVICE, WorkerService, add_to_server
from trunkline_worker.front.text.tokenizer_files import read_tokenizer_files
from trunkline_worker.link.engine_link import EngineLink

FILES = read_tokenizer_files(DEMO_MODEL)
MODEL = GetModelResponse(
    model="demo", worker_id="w", epoch=1, vocab_size=2048, context_length=512, block_size=16, kv_token_capacity=4096,
    eos_token_ids=[1], max_waiting_requests=100, max_waiting_tokens=100_000, max_running_requests=64,
)  # fmt: skip
WHOLE = {"values": [0.5, -1.0], "finish_reason": FinishReason.FINISH_REASON_STOP}
STEP = {"token_ids": [5], "finish_reason": FinishReason.FINISH_REASON_LENGTH}


class PromptEngine(EngineLink):
    """Each submit comes to one token, or a whole output, and its end, in the next turn of the event loop."""

    def __init__(self) -> None:
        self.front: Front | None = None
        self.submits: list[Submit] = []

    def submit(self, submit: Submit) -> None:
        self.submits.append(submit)
        step = WHOLE if submit.work.output > OutputKind.OUTPUT_KIND_TOKENS else STEP
        asyncio.get_running_loop().call_soon(self._answer, submit.handle, step)

    def _answer(self, handle: int, step: Any) -> None:
        assert self.front is not None
        self.front.on_step(EngineStep(outputs=[EngineOutput(handle=handle, **step)], last_handle=handle))

    def abort(self, handle: int) -> None:
        pass

    def finish(self, handle: int) -> None:
        pass

    def in_flight(self) -> set[int]:
        return set()

    async def stats(self) -> GetStatsResponse:
        return GetStatsResponse()


class ServedFront:
    def __init__(self, address: str, engine: PromptEngine, front: Front, service: WorkerService, door: Door) -> None:
        self.address, self.engine, self.front, self.door = address, engine, front, door
        self.backlog = service.backlog

    def num_open(self, kind: str) -> int:
        """Calls of this kind that have a place."""
        return self.door._kinds[kind].num_taken

    @property
    def num_calls(self) -> int:
        return sum(places.num_taken for places in self.door._kinds.values())


@asynccontextmanager
async def served_front(key: bytes = b"", model: GetModelResponse = MODEL) -> AsyncIterator[ServedFront]:
    engine, mirror = PromptEngine(), CacheMirror(model.epoch)
    front = engine.front = Front(model, FILES.tokenizer, mirror)
    front.connect(engine)

    def now_unix_ms() -> int:
        return int(time.time() * 1e3)

    authorizer = CallAuthorizer(GrantKeys(key), model.worker_id, model.epoch, now_unix_ms)
    door = Door(authorizer, model)
    server = GrpcServer("127.0.0.1", 0, services=[SERVICE], max_request_bytes=most_message_bytes(model), gate=door)
    draining = Draining(front, server.set_ready, lambda: False, 1.0)
    desk = GrantDesk(GrantKeys(key), model.epoch, now_unix_ms)
    service = WorkerService(front, FILES, draining, desk)
    add_to_server(service, server.grpc)
    await server.start()
    try:
        yield ServedFront(f"127.0.0.1:{server.port}", engine, front, service, door)
    finally:
        await server.stop(0)


def raw_call(channel: grpc.aio.Channel, method: str, message: bytes, **named: Any) -> Any:
    """A call that streams its answer, without any message class of ours."""
    multi_callable: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(f"/{SERVICE}/{method}")
    return multi_callable(message, **named)

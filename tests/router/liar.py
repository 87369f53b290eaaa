"""A worker that sends what a test wants, and requests that do not involve it."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from tests.router.cluster import Cluster
from tests.router.fake_worker import FakeChoice, FakeWorker
from trunkline.v1.generation_pb2 import SamplingParams
from trunkline.v1.worker_pb2 import (
    GetModelResponse,
    GetTokenizerResponse,
    LoadSample,
    SequenceOutput,
    SessionResponse,
    SessionWelcome,
    WatchCacheResponse,
)

PROMPT = [5, 6, 7, 8, 9]
HONEST_MODEL_NAME = "tiny"


@dataclass
class Liar(FakeWorker):
    """Says `said` in the place of what it would say: its model, a load sample, its welcome, or news of a choice."""

    said: Any = None
    told: bool = False
    may_speak: asyncio.Event = field(default_factory=asyncio.Event)

    async def GetModel(self, request: Any, context: Any) -> GetModelResponse:
        await self.may_speak.wait()
        honest = await super().GetModel(request, context)
        if not isinstance(self.said, GetModelResponse):
            return honest
        lie = GetModelResponse()
        lie.CopyFrom(self.said)
        if lie.model == HONEST_MODEL_NAME:
            lie.model = self.model
        return lie

    async def WatchCache(self, request: Any, context: Any) -> AsyncIterator[WatchCacheResponse]:
        async for item in super().WatchCache(request, context):
            yield item
            if isinstance(self.said, LoadSample):
                self.told = True
                yield WatchCacheResponse(epoch=self.epoch, sequence=self.sequence, load=self.said)
            if isinstance(self.said, list) and item.snapshot.last:
                self.told = True
                for said in self.said:
                    yield said

    async def Session(self, request_iterator: Any, context: Any) -> AsyncIterator[SessionResponse]:
        async for response in super().Session(request_iterator, context):
            if response.HasField("welcome") and isinstance(self.said, SessionWelcome):
                yield SessionResponse(welcome=self.said)
            else:
                yield response

    def _take(self, submit: Any, outbox: Any) -> FakeChoice:
        if not isinstance(self.said, SequenceOutput):
            return super()._take(submit, outbox)
        answer, self.answer = self.answer, None
        choice = super()._take(submit, outbox)
        self.arrived.get_nowait()
        self.answer, self.told = answer, True
        lie = SequenceOutput()
        lie.CopyFrom(self.said)
        if lie.handle == 1:
            lie.handle = submit.handle
        if lie.chunk.index == submit.choice and lie.HasField("prompt"):
            lie.prompt.prompt_tokens = len(submit.prompt_token_ids)
        outbox.put_nowait(SessionResponse(outputs=[lie]))
        return choice


async def innocents(router: Cluster, model: str, count: int = 4) -> None:
    """Requests of one model, some with and some without a bound: all are answered."""
    answers = await asyncio.gather(
        *(
            router.answer([*PROMPT, number], model=model, sampling=SamplingParams(max_tokens=3 if number % 2 else None))
            for number in range(count)
        )
    )
    assert all(answers)


@dataclass
class TokenizerLiar(Liar):
    """Sends `pieces` of tokenizer files, then ends or, while it `stands_still`, says no more."""

    pieces: list[tuple[str, bytes]] = field(default_factory=list)
    stands_still: bool = False

    async def GetTokenizer(self, request: Any, context: Any) -> AsyncIterator[GetTokenizerResponse]:
        self.tokenizer_calls += 1
        for name, data in self.pieces:
            yield GetTokenizerResponse(name=name, data=data)
        if self.stands_still:
            await asyncio.Event().wait()

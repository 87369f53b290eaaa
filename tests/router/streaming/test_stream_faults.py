"""An exception over one request's news ends that request, and neither its worker's session nor the others'."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from tests.router.cluster import cluster, refusal, until
from tests.router.fake_worker import FakeWorker
from trunkline.ledger import AnswerLedger
from trunkline.status import INTERNAL, RequestRefused
from trunkline.v1.generation_pb2 import OutputChunk
from trunkline.v1.worker_pb2 import GrantReport, SequenceOutput, Submit
from trunkline_router.quotas.reservation import OutputMeter
from trunkline_router.request.client_buffer import ClientBuffer
from trunkline_router.request.request_stream import RequestStream
from trunkline_router.workers.session import WorkerSession


def broken(*_: Any, **__: Any) -> Any:
    raise RuntimeError("a bug")


COMPUTATIONS: dict[str, Callable[[RequestStream], object]] = {
    "its ledger": lambda stream: stream.answer,
    "its meter": lambda stream: stream._meter,
    "what waits for it": lambda stream: stream._client_buffer,
}


@pytest.mark.parametrize("when_finished", [False, True])
@pytest.mark.parametrize("name", COMPUTATIONS)
async def test_a_request_whose_news_cannot_be_taken_is_internal_and_the_others_go_on(
    name: str, when_finished: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams: list[RequestStream] = []
    begin = RequestStream.begin

    def noted(self: RequestStream, *args: Any) -> Any:
        streams.append(self)
        return begin(self, *args)

    monkeypatch.setattr(RequestStream, "begin", noted)
    worker = FakeWorker("a", answer=None)
    async with cluster(worker) as router:
        calls = [asyncio.ensure_future(router.answer([5, 6, 7 + index], n=2)) for index in range(3)]
        choices = [await worker.arrived.get() for _ in range(6)]
        for choice in choices:
            choice.tokens(1)
        await until(lambda: all(stream.answer.completion_tokens == 2 for stream in streams))
        owner = COMPUTATIONS[name](streams[1])
        for kind in (AnswerLedger, OutputMeter, ClientBuffer):
            if isinstance(owner, kind):
                add: Any = kind.add
                monkeypatch.setattr(
                    kind, "add", lambda self, *args, add=add: broken() if self is owner else add(self, *args)
                )
        for choice in choices:
            choice.tokens(1, finish=when_finished)
        await until(lambda: streams[1]._refused is not None)
        if not when_finished:
            await until(lambda: len(worker.aborted) == 2)
            for choice in choices:
                if choice.submit not in worker.aborted:
                    choice.tokens(1, finish=True)
        answers = await asyncio.gather(*calls, return_exceptions=True)
        failed = [answer for answer in answers if isinstance(answer, BaseException)]
        assert len(failed) == 1
        with pytest.raises(RequestRefused) as caught:
            await streams[1].take()
        assert caught.value.reason == INTERNAL
        assert worker.asked == 1, "the session goes on"
        router.assert_idle()


async def test_a_sink_that_raises_costs_the_session_nothing() -> None:
    heard: list[tuple[int, object]] = []
    session = WorkerSession()
    sinks = [broken, heard.append, broken]
    session.submit([Submit() for _ in sinks], sinks)  # type: ignore[arg-type]
    granted = session.grant([Submit(), Submit()], broken)
    for _ in range(2):
        for handle in range(1, 4):
            session.outputs.hand_out(SequenceOutput(handle=handle, chunk=OutputChunk()))
        for handle in granted:
            session.outputs.hand_out(SequenceOutput(handle=handle, granted=GrantReport()))
    assert len(heard) == 2
    assert list(session._pending.abort_handles) == [1, 3]
    session.submit([Submit(), Submit()], [broken, heard.append])  # type: ignore[list-item]
    session.outputs.close("the worker is lost")
    assert len(heard) == 4, "all are told that the worker is lost"


async def test_the_refusal_reaches_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ClientBuffer, "add", broken)
    worker = FakeWorker("a")
    async with cluster(worker) as router:
        refused = await refusal(router.generate([5, 6]))
        assert refused.reason == INTERNAL
        router.assert_idle()

"""When submits leave: at once while there is time, together under load. Over real gRPC."""

import asyncio
from contextlib import suppress
from typing import Any

from tests.router.cluster import until
from tests.router.fake_worker import FakeWorker
from trunkline.v1.generation_pb2 import SamplingParams
from trunkline.v1.worker_pb2 import Submit
from trunkline.v1.worker_pb2_grpc import WorkerServiceStub
from trunkline_router.session import WorkerSession
from trunkline_runtime.channel import open_channel


def submits() -> list[Submit]:
    return [Submit(request_id="r", prompt_token_ids=[1, 2, 3], sampling=SamplingParams(max_tokens=3))]


async def test_a_submit_that_comes_alone_leaves_at_once_and_those_of_a_burst_leave_together() -> None:
    worker = await FakeWorker("a").start()
    resting, rested = asyncio.Event(), asyncio.Event()

    async def rest() -> None:
        resting.set()
        await rested.wait()

    session = WorkerSession(rest)
    news: list[int] = []

    def send() -> None:
        session.submit(submits(), [lambda output: news.append(output.handle)])

    async with open_channel(worker.address) as channel:
        stub: Any = WorkerServiceStub(channel)
        running = asyncio.create_task(session.run(stub, "router", lambda welcome: None))
        send()
        await until(lambda: news == [1])
        await resting.wait()
        for _ in range(3):
            send()
            await asyncio.sleep(0)  # a turn of the event loop for each
        rested.set()
        await until(lambda: news == [1, 2, 3, 4])
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
    await worker.die()
    messages = [[submit.handle for submit in message.submits] for message in worker.messages]
    assert [handles for handles in messages if handles] == [[1], [2, 3, 4]]

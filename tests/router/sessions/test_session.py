"""When submits leave: at once while there is time, together under load. Over real gRPC."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from tests.router.cluster import until
from tests.router.fake_worker import FakeWorker
from trunkline.v1.generation_pb2 import SamplingParams
from trunkline.v1.worker_pb2 import Submit
from trunkline_router.workers.session import WorkerSession
from trunkline_runtime.channel import open_channel


class Rest:
    """A session's rest, that lasts until the test says so."""

    def __init__(self) -> None:
        self.began = asyncio.Event()
        self.over = asyncio.Event()

    async def __call__(self) -> None:
        self.began.set()
        await self.over.wait()


@asynccontextmanager
async def connected(worker: FakeWorker, rest: Rest) -> AsyncIterator[WorkerSession]:
    session = WorkerSession(rest)
    await worker.start()
    async with open_channel(worker.address) as channel:
        running = asyncio.create_task(session.run(channel, "router", lambda welcome: None))
        yield session
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
    await worker.die()


def send(session: WorkerSession) -> int:
    submit = Submit(request_id="r", prompt_token_ids=[1, 2, 3], sampling=SamplingParams(max_tokens=3))
    return session.submit([submit], [lambda output: None])[0]


async def test_what_is_sent_while_a_session_rests_leaves_in_one_message() -> None:
    worker, rest = FakeWorker("a", answer=None), Rest()
    async with connected(worker, rest) as session:
        send(session)
        send(session)
        await until(lambda: len(worker.submits) == 2)
        send(session)
        await rest.began.wait()
        for _ in range(3):
            send(session)
            await asyncio.sleep(0)  # a turn of the event loop for each
        rest.over.set()
        await until(lambda: len(worker.submits) == 6)
    assert {4, 5, 6} <= {submit.handle for submit in worker.messages[-1].submits}


async def test_requests_that_come_one_after_the_other_never_wait_for_a_rest() -> None:
    worker, rest = FakeWorker("a"), Rest()
    async with connected(worker, rest) as session:
        for count in range(1, 6):
            send(session)
            await until(lambda count=count: len(worker.submits) == count and not session.num_open)  # type: ignore[misc]
    assert not rest.began.is_set()


async def test_aborts_that_follow_one_another_share_a_message() -> None:
    """Clients that come and leave by the thousand cost a message for each pause, not one each."""
    worker, rest = FakeWorker("a", answer=None), Rest()
    async with connected(worker, rest) as session:
        handles = [send(session) for _ in range(4)]
        await until(lambda: len(worker.submits) == 4)
        session.abort(handles[:1])
        await rest.began.wait()
        for handle in handles[1:]:
            session.abort([handle])
            await asyncio.sleep(0)
        rest.over.set()
        await until(lambda: len(worker.aborted) == 4)
    assert [list(message.abort_handles) for message in worker.messages[-2:]] == [handles[:1], handles[1:]]

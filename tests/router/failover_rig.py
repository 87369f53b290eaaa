"""Workers that die with requests, and what their clients still get."""

from typing import Any

import grpc

from tests.router.cluster import Cluster, until
from tests.router.fake_worker import FakeChoice, FakeWorker
from trunkline.status import no_worker

PROMPT = list(range(10, 30))
LONG = PROMPT * 20  # worth going to its holder for, whatever else waits there

DIED = no_worker("the engine died")


def fakes(*names: str, **fields: Any) -> list[FakeWorker]:
    return [FakeWorker(name, answer=None, **fields) for name in names]


async def rest(call: Any) -> list[Any]:
    responses = []
    while (response := await call.read()) is not grpc.aio.EOF:
        responses.append(response)
    return responses


async def first_of(workers: list[FakeWorker]) -> FakeChoice:
    await until(lambda: any(not worker.arrived.empty() for worker in workers))
    return await next(worker for worker in workers if not worker.arrived.empty()).arrived.get()


async def dies(router: Cluster, workers: list[FakeWorker], worker: FakeWorker) -> None:
    """A worker ends, once the router has read its last words: a connection that breaks loses what is on its way."""
    connected = router.connected(workers.index(worker))
    await until(lambda: not connected.session.num_open)
    await worker.die()


async def kills_two(router: Cluster, workers: list[FakeWorker], call: Any) -> list[FakeWorker]:
    """Two workers die with the call's request, the second one with it alone, and are gone. Returns the others."""
    left = list(workers)
    for sole_suspect in (False, True):
        choice = await first_of(left)
        choice.fail(DIED, suspect=True, sole_suspect=sole_suspect)
        await dies(router, workers, choice.worker)
        left.remove(choice.worker)
    return left

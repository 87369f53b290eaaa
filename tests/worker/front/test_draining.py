"""Drains of a front, and their ends."""

import asyncio

import pytest

from tests.worker.front.front_rig import MODEL, PROMPT, TOKENIZER, Link, Reader
from trunkline.status import NO_WORKER, RequestRefused
from trunkline.v1.generation_pb2 import SamplingParams
from trunkline.v1.worker_pb2 import Submit
from trunkline_worker.front.cache_mirror import CacheMirror
from trunkline_worker.front.draining import Draining
from trunkline_worker.front.front import Front

SUBMIT = Submit(handle=1, request_id="r", prompt_token_ids=PROMPT, sampling=SamplingParams(seed=1))


class Worker:
    """A front, and the health status that its drains set."""

    def __init__(self) -> None:
        self.front = Front(MODEL, TOKENIZER, CacheMirror(1))
        self.front.connect(Link())
        self.is_ready, self.is_stopping = True, False
        self.draining = Draining(self.front, self._set_ready, lambda: self.is_stopping, timeout_s=60.0)

    async def _set_ready(self, is_ready: bool) -> None:
        self.is_ready = is_ready

    @property
    def admits(self) -> bool:
        """As the front, its health and its load samples agree."""
        (admits,) = {not self.front.draining, self.is_ready, not self.front.mirror.load.draining}
        return admits


async def test_an_undrained_worker_admits_requests_and_the_drain_cuts_nothing_off() -> None:
    worker, reader = Worker(), Reader()
    worker.front.submit(SUBMIT, reader)
    drains = [asyncio.create_task(worker.draining.drain(timeout_s)) for timeout_s in (None, 30.0)]
    await asyncio.sleep(0)  # they begin
    assert not worker.admits
    with pytest.raises(RequestRefused):
        worker.front.submit(SUBMIT, Reader())
    await worker.draining.undrain()
    assert worker.admits
    assert [((drained := await drain).finished, drained.aborted) for drain in drains] == [(0, 0)] * 2
    assert reader.num_ends == 0
    worker.front.submit(SUBMIT, Reader())
    assert worker.front.num_choices == 2


async def test_a_drain_after_an_undrain_is_a_drain_like_the_first() -> None:
    worker, reader = Worker(), Reader()
    worker.front.submit(SUBMIT, reader)
    first = asyncio.create_task(worker.draining.drain())
    await asyncio.sleep(0)
    await worker.draining.undrain()
    assert (await worker.draining.drain(0.0)).aborted == 1
    assert (await first).aborted == 0
    assert (reader.reasons, worker.admits) == ([NO_WORKER], False)


async def test_a_worker_that_does_not_drain_can_be_undrained() -> None:
    worker = Worker()
    await worker.draining.undrain()
    assert worker.admits


async def test_a_worker_that_stops_or_whose_engine_has_ended_is_not_undrained() -> None:
    stopping, dead = Worker(), Worker()
    stopping.is_stopping = True
    dead.front.on_engine_death("killed")
    for worker in (stopping, dead):
        await worker.draining.drain()
        with pytest.raises(RequestRefused, match="this worker is stopping") as caught:
            await worker.draining.undrain()
        assert caught.value.reason == NO_WORKER
        assert not worker.admits

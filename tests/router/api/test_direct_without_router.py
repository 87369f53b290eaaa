"""The direct path where a worker is silent and its router slow, still, about to stop or gone."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.router.cluster import Cluster, cluster, until
from tests.router.direct_rig import KEY, PROMPT, Stream, arrival, direct, fakes
from tests.router.fake_worker import WORKER_DRAINS, FakeWorker
from trunkline.client.grant_call import GrantCall
from trunkline.errors import NoWorker, TrunklineError
from trunkline.v1.inference_pb2 import GrantRequest
from trunkline_router.request.granting import _Granting
from trunkline_router.routing.worker_state import InFlight
from trunkline_router.workers.link_context import LinkLimits

SOON = LinkLimits(inter_token_timeout_s=0.04)

OnQuestion = Callable[[], Awaitable[None]]


@pytest.fixture
def on_question(monkeypatch: pytest.MonkeyPatch) -> Callable[[OnQuestion], None]:
    """Sets what the router does when it is asked what a silence means, before it thinks of an answer."""
    read_next = _Granting._next

    def set_to(on_silent: OnQuestion) -> None:
        async def read(self: _Granting, flight: InFlight) -> GrantRequest | None:
            message = await read_next(self, flight)
            if message is not None and message.HasField("silent"):
                await on_silent()
            return message

        monkeypatch.setattr(_Granting, "_next", read)

    return set_to


async def works_for_others(router: Cluster, workers: list[FakeWorker], *numbers: int) -> None:
    """These do, as the router hears."""
    both = [router.connected(number) for number in numbers]
    heard = [worker.num_messages for worker in both]
    for number in numbers:
        workers[number].send_load(running=1)
    await until(lambda: all(worker.num_messages > before for worker, before in zip(both, heard, strict=True)))


async def test_who_waits_in_a_queue_is_left_there_and_who_waits_for_a_hung_worker_goes_on_elsewhere(
    on_question: Callable[[OnQuestion], None],
) -> None:
    workers = fakes("a", "b")
    questions = 0
    hung: list[int] = []
    async with (
        cluster(*workers, grant_key=KEY, link_limits=SOON) as router,
        direct(router, inter_token_timeout_s=0.02) as client,
    ):

        async def falls_silent() -> None:
            nonlocal questions
            questions += 1
            await works_for_others(router, workers, *({0, 1} if questions < 4 else {0, 1}.difference(hung)))

        on_question(falls_silent)
        stream = Stream(client)
        choice = await arrival(workers)
        hung.append(workers.index(choice.worker))
        resumed = await arrival(workers)
        assert questions >= 4
        assert resumed.worker is not choice.worker
        resumed.tokens(2, finish=True)
        await stream.task
        connected = router.connected(hung[0])
        assert connected.breaker.is_closed
        workers[hung[0]].send_load(running=0)  # the router may have found by itself that the worker hangs
        await until(lambda: connected.accepts)


async def test_a_router_that_stands_still_stops_no_stream(on_question: Callable[[OnQuestion], None]) -> None:
    workers = fakes("a")
    asked, goes_on = asyncio.Event(), asyncio.Event()

    async def stand_still() -> None:
        asked.set()
        await goes_on.wait()

    on_question(stand_still)
    async with cluster(*workers, grant_key=KEY) as router, direct(router, inter_token_timeout_s=0.02) as client:
        stream = Stream(client)
        choice = await arrival(workers)
        choice.tokens(1)
        await stream.came(1)
        await asked.wait()
        for count in range(2, 10):
            choice.tokens(1)
            await stream.came(count)
        choice.tokens(1, finish=True)
        await stream.task
        assert stream.tokens() == list(range(10))
        assert stream.pieces[-1].response.usage.resumptions == 0
        goes_on.set()


async def test_a_worker_that_was_granted_too_late_is_gone_to_when_the_first_one_is_lost(
    on_question: Callable[[OnQuestion], None],
) -> None:
    workers = fakes("a", "b")
    asked, goes_on = asyncio.Event(), asyncio.Event()
    async with (
        cluster(*workers, grant_key=KEY, link_limits=SOON) as router,
        direct(router, inter_token_timeout_s=0.02) as client,
    ):

        async def stand_still_at_first() -> None:
            if asked.is_set():
                await works_for_others(router, workers, 1 - home)
            asked.set()
            await goes_on.wait()

        on_question(stand_still_at_first)
        stream = Stream(client, max_tokens=9)
        choice = await arrival(workers)
        home = workers.index(choice.worker)
        choice.tokens(1)
        await stream.came(1)
        await asked.wait()
        choice.tokens(2)
        await stream.came(3)
        asked_s = router.connected(home).watched_s
        await until(lambda: router.connected(home).watched_s > asked_s + SOON.inter_token_timeout_s)
        goes_on.set()  # it takes the worker for hung, and names the other one
        other = router.connected(1 - home)
        await until(lambda: other.open_choices == 1)
        await choice.worker.die()
        resumed = await arrival(workers)
        assert list(resumed.submit.resume.output_token_ids) == [0, 1, 2]
        resumed.tokens(2, finish=True)
        await stream.task
        assert stream.tokens() == [0, 1, 2, 3, 4]


async def test_where_neither_worker_nor_router_says_anything_the_answer_ends(
    on_question: Callable[[OnQuestion], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trunkline.client.grant_call.UNANSWERED_S", 0.05)
    workers = fakes("a")

    async def stand_still() -> None:
        await asyncio.Event().wait()

    on_question(stand_still)
    async with cluster(*workers, grant_key=KEY) as router, direct(router, inter_token_timeout_s=0.02) as client:
        with pytest.raises(NoWorker, match="neither the worker nor the router"):
            await client.complete(PROMPT)


async def test_a_client_that_is_closed_while_its_router_stands_still_says_so(
    on_question: Callable[[OnQuestion], None],
) -> None:
    workers = fakes("a")
    asked = asyncio.Event()

    async def stand_still() -> None:
        asked.set()
        await asyncio.Event().wait()

    on_question(stand_still)
    async with cluster(*workers, grant_key=KEY) as router:
        client = direct(router, inter_token_timeout_s=0.02)
        stream = Stream(client)
        await arrival(workers)
        await asked.wait()
        await client.close()
        with pytest.raises(TrunklineError, match="closed"):
            await stream.task


async def test_a_router_that_stops_does_not_wait_for_answers_that_have_begun(
    on_question: Callable[[OnQuestion], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = fakes("a")
    exchange = GrantCall._exchange
    asked_in_vain = asyncio.Event()

    async def noted(self: GrantCall, message: GrantRequest, *, wants_answer: bool) -> Any:
        answer = await exchange(self, message, wants_answer=wants_answer)
        if message.HasField("silent") and isinstance(answer, NoWorker):
            asked_in_vain.set()
        return answer

    monkeypatch.setattr(GrantCall, "_exchange", noted)
    async with cluster(*workers, grant_key=KEY) as router, direct(router, inter_token_timeout_s=0.02) as client:
        on_question(lambda: works_for_others(router, workers, 0))
        stream = Stream(client)
        choice = await arrival(workers)
        connected = router.connected(0)
        stopping = asyncio.create_task(router.service.stop_admission())
        await asyncio.sleep(0)  # it begins
        assert not stopping.done(), "an answer that has not begun may need it"
        choice.tokens(1)
        await stopping
        choice.tokens(2)
        await stream.came(3)
        assert connected.open_choices == 0
        await asked_in_vain.wait()
        choice.tokens(2, finish=True)
        await stream.task
        assert stream.tokens() == [0, 1, 2, 3, 4]


async def test_while_a_router_that_stops_waits_for_others_it_serves_those_that_lose_their_workers_too() -> None:
    workers = fakes("a", "b")
    async with cluster(*workers, grant_key=KEY) as router, direct(router) as client:
        begun = Stream(client, max_tokens=9)
        first = await arrival(workers)
        first.tokens(1)
        await begun.came(1)
        routed = router.generate(PROMPT)
        other = await arrival(workers)
        stopping = asyncio.create_task(router.service.stop_admission())
        await asyncio.sleep(0)  # it begins
        first.fail(WORKER_DRAINS)
        resumed = await arrival(workers)
        other.tokens(1, finish=True)
        async for _ in routed:
            pass
        assert not stopping.done()
        resumed.tokens(1)
        await stopping
        resumed.tokens(1, finish=True)
        await begun.task
        assert begun.tokens() == [0, 1, 2]


async def test_who_loses_its_worker_after_its_router_has_stopped_is_told() -> None:
    workers = fakes("a", "b")
    async with cluster(*workers, grant_key=KEY) as router, direct(router) as client:
        stream = Stream(client)
        choice = await arrival(workers)
        choice.tokens(1)
        await stream.came(1)
        await router.service.stop_admission()
        choice.fail(WORKER_DRAINS)
        with pytest.raises(NoWorker, match="the router has ended the call"):
            await stream.task

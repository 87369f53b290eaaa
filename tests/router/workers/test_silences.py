"""A direct client's worker that says nothing: when it is left, by the router's own measure, and what that costs."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from tests.router.cluster import Cluster, router_before, until
from tests.router.direct_rig import KEY, PROMPT, Call, Stream, arrival, direct, fakes
from tests.router.fake_worker import FakeWorker
from trunkline.status import QUOTA_EXCEEDED, RequestRefused
from trunkline.v1.generation_pb2 import SamplingParams
from trunkline.v1.inference_pb2 import DirectLost, GrantRequest
from trunkline.v1.worker_pb2 import StepCostModel
from trunkline_router.access.access import Tenant, Tenants
from trunkline_router.quotas.admission import RequestUse
from trunkline_router.quotas.quota import Quotas
from trunkline_router.request.granting import _Granting
from trunkline_router.routing.worker_state import InFlight
from trunkline_router.workers.health import Silence
from trunkline_router.workers.link_context import LinkLimits

SILENT = GrantRequest(silent=DirectLost())
FIFTY = SamplingParams(max_tokens=50)  # with the prompt: 70 tokens
SOON = LinkLimits(inter_token_timeout_s=0.04)


@asynccontextmanager
async def patient(
    *workers: FakeWorker, link_limits: LinkLimits | None = None, quotas: Quotas | None = None
) -> AsyncIterator[Cluster]:
    """A router that leaves silent workers by these limits, with these quotas for all tenants."""
    async with AsyncExitStack() as stack:
        for worker in workers:
            await worker.start()
            stack.push_async_callback(worker.die)
        yield await stack.enter_async_context(
            router_before(
                *workers,
                tenants=Tenants(otherwise=Tenant(quotas=quotas or Quotas(requests_per_minute=1))),
                grant_key=KEY,
                link_limits=link_limits,
            )
        )


def home(workers: list[FakeWorker], address: str) -> int:
    return [worker.address for worker in workers].index(address)


async def until_watched(router: Cluster, number: int, for_s: float) -> None:
    """Waits until the router has looked after the worker for so much longer."""
    connected = router.connected(number)
    since_s = connected.watched_s
    await until(lambda: connected.watched_s >= since_s + for_s)


def test_a_silence_is_never_taken_for_longer_than_it_was() -> None:
    silence = Silence(100.0, num_messages=7)
    assert silence.lasts_s(104.0, num_messages=7) == 4.0
    assert silence.lasts_s(109.0, num_messages=8) == 0.0, "it may have come this moment"
    assert silence.lasts_s(112.0, num_messages=8) == 3.0


async def test_a_worker_in_a_long_step_is_not_left_however_impatient_the_client_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    questions = 0
    read_next = _Granting._next

    async def counted(self: _Granting, flight: InFlight) -> GrantRequest | None:
        nonlocal questions
        message = await read_next(self, flight)
        questions += message is not None and message.HasField("silent")
        return message

    monkeypatch.setattr(_Granting, "_next", counted)
    workers = fakes("a", "b", "c", "d", "e")
    async with patient(*workers) as router, direct(router, inter_token_timeout_s=0.02) as client:
        stream = Stream(client, max_tokens=50)
        choice = await arrival(workers)
        await until(lambda: questions >= 6)
        choice.tokens(2, finish=True)
        await stream.task
        assert stream.tokens() == [0, 1]
        assert stream.pieces[-1].response.usage.resumptions == 0
    assert sum(len(worker.submits) for worker in workers) == 1, "nothing was computed twice, or paid for twice"


async def test_steps_that_are_long_by_the_workers_own_word_make_the_router_as_patient() -> None:
    workers = fakes("a", "b")
    async with patient(*workers, link_limits=SOON, quotas=Quotas()) as router:
        call = Call(router, sampling=FIFTY)
        number = home(workers, (await call.begin()).worker_address)
        connected = router.connected(number)
        workers[number].send_load(running=1, step_cost=StepCostModel(fixed_s=10.0))
        await until(lambda: connected.may_be_silent_s > 30.0)
        for _ in range(3):
            assert (await call.ask(SILENT)).wait
            await until_watched(router, number, 2 * SOON.inter_token_timeout_s)
        workers[number].send_load(running=1, step_cost=StepCostModel(fixed_s=0.001))
        await until(lambda: connected.may_be_silent_s < 1.0)
        assert (await call.ask(SILENT)).wait, "it has said something since"
        await until_watched(router, number, 2 * SOON.inter_token_timeout_s)
        moved = await call.ask(SILENT)
        assert home(workers, moved.worker_address) != number
        call.call.cancel()


async def test_a_worker_that_hangs_is_left_on_the_same_account() -> None:
    workers = fakes("a", "b", hangs=True)
    async with patient(*workers, link_limits=SOON) as router:
        call = Call(router, sampling=FIFTY)
        number = home(workers, (await call.begin()).worker_address)
        await until(lambda: router.connected(number).is_hung)
        moved = await call.ask(SILENT)
        assert home(workers, moved.worker_address) != number
        call.call.cancel()


async def test_to_leave_a_silent_worker_that_answers_its_router_is_paid_for() -> None:
    workers = fakes("a", "b")
    async with patient(*workers, link_limits=SOON) as router:
        call = Call(router, sampling=FIFTY)
        number = home(workers, (await call.begin()).worker_address)
        await until_watched(router, number, 2 * SOON.inter_token_timeout_s)
        assert (await call.refused(SILENT)).reason == QUOTA_EXCEEDED


async def test_the_account_of_a_worker_that_was_left_is_settled_as_soon_as_that_says_so() -> None:
    workers = fakes("a", "b")
    quotas = Quotas(tokens_in_flight=200)
    async with (
        patient(*workers, link_limits=SOON, quotas=quotas) as router,
        direct(router, inter_token_timeout_s=0.02) as client,
    ):

        async def is_settled() -> bool:
            try:
                use = RequestUse(len(PROMPT), 110, most_tokens=110, choices=1)
                with await router.shared.reserve("", quotas, use, is_listed=False, weight=1.0):
                    return True  # 130 of 200 tokens are free beside the 70 of one grant
            except RequestRefused:
                return False

        for worker in workers:
            worker.send_load(running=1, step_cost=StepCostModel(fixed_s=100.0))
        await until(lambda: all(router.connected(number).may_be_silent_s >= 300.0 for number in range(2)))
        stream = Stream(client, max_tokens=50)
        left = await arrival(workers)
        assert await is_settled(), "of one grant"
        left.worker.send_load(running=1, step_cost=StepCostModel(fixed_s=0.001))
        other = await arrival(workers)
        assert other.worker is not left.worker
        while not await is_settled():
            pass
        other.tokens(2, finish=True)
        await stream.task

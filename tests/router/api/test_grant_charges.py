"""What grants cost their tenant: what workers compute for them by the workers' own word, and never less."""

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from tests.router.cluster import Cluster, router_before, until
from tests.router.direct_rig import KEY, PROMPT, Call, Stream, Timers, arrival, direct, fakes, lost
from tests.router.fake_worker import WORKER_DRAINS, FakeWorker
from trunkline.errors import InvalidRequest, Overloaded
from trunkline.status import CODE_RESOURCE_EXHAUSTED, OVERLOADED, QUOTA_EXCEEDED, RequestRefused
from trunkline.v1.generation_pb2 import RequestError, SamplingParams
from trunkline.v1.inference_pb2 import GrantRequest
from trunkline.v1.worker_pb2 import GrantReport, WorkerServiceGenerateRequest
from trunkline.v1.worker_pb2_grpc import WorkerServiceStub
from trunkline_router.access.access import Tenant, Tenants
from trunkline_router.quotas.admission import RequestUse
from trunkline_router.quotas.quota import Quotas
from trunkline_router.request.grant_charge import GrantCharge
from trunkline_router.request.granting import MID_ANSWER_WAIT_S
from trunkline_runtime.channel import open_channel

FULL = RequestRefused(CODE_RESOURCE_EXHAUSTED, OVERLOADED, "full", retry_delay_ms=500)
CLAIMED_FULL = RequestError(reason=OVERLOADED, retry_delay_ms=1)
FIFTY = SamplingParams(max_tokens=50)  # with the prompt: 70 tokens


@asynccontextmanager
async def limited(*workers: FakeWorker, **quotas: int) -> AsyncIterator[Cluster]:
    """A router with these quotas for all tenants; what is settled counts there within a tick."""
    tenants = Tenants(otherwise=Tenant(quotas=Quotas(**quotas)))
    async with AsyncExitStack() as stack:
        for worker in workers:
            await worker.start()
            stack.push_async_callback(worker.die)
        yield await stack.enter_async_context(
            router_before(
                *workers,
                tenants=tenants,
                grant_key=KEY,
            )
        )


async def refused_for_quota(router: Cluster) -> bool:
    call = Call(router, sampling=FIFTY)
    return bool((await call.refused(call.first)).reason == QUOTA_EXCEEDED)


async def is_held(router: Cluster) -> bool:
    """Whether the same is, also where the router admits nothing more."""
    try:
        with await router.shared.reserve(
            "",
            Quotas(tokens_in_flight=100),
            RequestUse(len(PROMPT), 50, most_tokens=50, choices=1),
            is_listed=False,
            weight=1.0,
        ):
            return False
    except RequestRefused:
        return True


async def until_nothing_is_held(router: Cluster) -> None:
    """Waits for the worker's reports on what has ended: they come after the answer's last piece."""
    while await is_held(router):  # noqa: ASYNC110  # what is waited for has no event of its own
        await asyncio.sleep(0.002)


async def until_admitted(router: Cluster, max_tokens: int) -> None:
    """Waits until a request of so many tokens is; nothing comes of it."""

    async def is_admitted() -> bool:
        try:
            async with direct(router) as client:
                await client.complete(PROMPT, max_tokens=max_tokens)
        except Overloaded:
            return False
        return True

    while not await is_admitted():
        pass


async def test_an_answer_costs_what_the_worker_computed_whatever_its_client_says() -> None:
    (worker,) = fakes("a", answer=4)
    async with limited(worker, tokens_per_minute=100) as router, direct(router) as client:
        with pytest.raises(Overloaded, match="max_tokens"):
            await client.complete(PROMPT, max_tokens=90)
        with pytest.raises(InvalidRequest):
            await client.complete(PROMPT, max_tokens=70, top_p=7.0)
        await client.complete(PROMPT, max_tokens=70)
        await until_admitted(router, 56)  # 24 of 100 were used, of 90 reserved
        with pytest.raises(Overloaded) as caught:
            await client.complete(PROMPT, max_tokens=40)  # and now 48
        assert caught.value.reason == QUOTA_EXCEEDED
        assert len(worker.submits) == 2


@pytest.mark.parametrize(
    "claim",
    [lost(refusal=CLAIMED_FULL), lost(), lost(1)],
    ids=["full", "lost", "lost on the way"],
)
async def test_every_further_grant_is_paid_for_where_the_client_alone_says_that_the_last_is_void(
    claim: GrantRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trunkline_router.request.granting.MID_ANSWER_WAIT_S", 0.1)
    workers = fakes("a", "b")
    async with limited(*workers, requests_per_minute=1) as router:
        call = Call(router, sampling=FIFTY)
        await call.begin()
        assert (await call.refused(claim)).reason == QUOTA_EXCEEDED


async def test_who_is_sent_away_by_a_full_worker_pays_once_and_needs_no_second_quota() -> None:
    workers = fakes("a", "b")
    async with limited(*workers, requests_per_minute=1, tokens_in_flight=70) as router, direct(router) as client:
        stream = Stream(client, max_tokens=50)
        full = await arrival(workers)
        full.fail(FULL)
        other = await arrival(workers)
        assert other.worker is not full.worker
        other.tokens(2, finish=True)
        await stream.task


@pytest.mark.parametrize("how", ["dies", "drains"])
async def test_who_loses_a_worker_goes_on_without_a_second_quota(how: str) -> None:
    workers = fakes("a", "b")
    async with limited(*workers, requests_per_minute=1, tokens_in_flight=70) as router, direct(router) as client:
        stream = Stream(client, max_tokens=50)
        choice = await arrival(workers)
        choice.tokens(3)
        await stream.came(3)
        if how == "dies":
            await choice.worker.die()
        else:
            choice.fail(WORKER_DRAINS)
        resumed = await arrival(workers)
        resumed.tokens(2, finish=True)
        await stream.task
        assert stream.tokens() == [0, 1, 2, 3, 4]


async def test_the_middle_of_an_answer_is_worth_waiting_for_the_router_to_see_that_the_worker_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[float] = []
    is_excused = GrantCharge.is_excused

    def noted(self: GrantCharge, within_s: float, *, hangs: bool) -> Awaitable[bool]:
        asked.append(within_s)
        return is_excused(self, within_s, hangs=hangs)

    monkeypatch.setattr(GrantCharge, "is_excused", noted)
    monkeypatch.setattr("trunkline_router.request.granting.REPORT_WAIT_S", 0.0)
    workers = fakes("a", "b")
    async with limited(*workers, requests_per_minute=1) as router:
        call = Call(router, sampling=FIFTY)
        granted = await call.begin()
        further = asyncio.create_task(call.ask(lost(1)))
        await until(lambda: MID_ANSWER_WAIT_S in asked)
        await next(worker for worker in workers if worker.address == granted.worker_address).die()
        assert (await further).grants
        call.call.cancel()


async def test_who_hangs_up_holds_what_its_grants_may_come_to_until_they_cannot_be_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    timers = Timers(monkeypatch)
    (worker,) = fakes("a", answer=2)
    async with limited(worker, tokens_in_flight=100) as router:
        call = Call(router, sampling=FIFTY)
        await call.begin()
        call.call.cancel()
        await until(lambda: router.connected(0).open_choices == 0)
        assert await refused_for_quota(router)
        await timers.go_off()
        await until_admitted(router, 50)


async def test_a_call_that_stays_open_over_expired_grants_holds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    timers = Timers(monkeypatch)
    workers = fakes("a", "b", answer=2)
    async with limited(*workers, tokens_in_flight=100) as router:
        call = Call(router, sampling=FIFTY)
        await call.begin()
        assert await refused_for_quota(router)
        await timers.go_off()
        await until_admitted(router, 50)
        await until_nothing_is_held(router)
        assert (await call.ask(lost())).grants, "and may ask for others, on another account"
        assert await refused_for_quota(router)
        call.call.cancel()


async def test_a_grant_that_is_used_after_its_client_has_hung_up_is_paid_for_and_held_while_it_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    timers = Timers(monkeypatch)
    reports: list[GrantReport | None] = []
    hear = GrantCharge._hear

    def noted(self: GrantCharge, handle: int, report: GrantReport | None) -> None:
        reports.append(report)
        hear(self, handle, report)

    monkeypatch.setattr(GrantCharge, "_hear", noted)
    (worker,) = fakes("a")
    async with limited(worker, tokens_in_flight=100, tokens_per_minute=140) as router:
        call = Call(router, sampling=FIFTY)
        granted = await call.begin()
        call.call.cancel()
        async with open_channel(granted.worker_address) as channel:
            stub = WorkerServiceStub(channel)
            used = stub.Generate(WorkerServiceGenerateRequest(grant=granted.grants[0]))
            choice = await arrival([worker])
            await until(lambda: router.connected(0).open_choices == 0)
            await until(lambda: reports == [GrantReport()])
            await timers.go_off()
            assert await refused_for_quota(router)
            choice.tokens(50, finish=True)
            async for _ in used:
                pass
        worker.answer = 1
        await until_admitted(router, 40)
        assert await refused_for_quota(router), "70 + 21 of 140 were used: another 70 are too many"


async def test_grants_of_a_worker_that_is_lost_are_charged_in_full() -> None:
    workers = fakes("a", "b", answer=1)
    async with limited(*workers, tokens_in_flight=100, tokens_per_minute=150) as router:
        call = Call(router, sampling=FIFTY)
        granted = await call.begin()
        call.call.cancel()
        (home,) = (number for number in range(2) if workers[number].address == granted.worker_address)
        await workers[home].die()
        await router.until_workers(*(number != home for number in range(2)))
        await until_admitted(router, 50)
        assert await refused_for_quota(router), "70 + 21 of 150 were used: another 70 are too many"


async def test_what_runs_on_without_its_router_is_held_for_as_long_as_that_hears_of_it() -> None:
    (worker,) = fakes("a")
    async with limited(worker, tokens_in_flight=100) as router, direct(router) as client:
        stream = Stream(client, max_tokens=50)
        choice = await arrival([worker])
        choice.tokens(1)
        await stream.came(1)
        await router.service.stop_admission()
        assert router.connected(0).open_choices == 0
        assert await is_held(router)
        choice.tokens(2, finish=True)
        await stream.task
        await until_nothing_is_held(router)


async def test_a_request_that_no_quota_ever_holds_in_full_goes_through_the_router() -> None:
    (worker,) = fakes("a", answer=2)
    async with limited(worker, tokens_in_flight=100) as router, direct(router) as client:
        answer = await client.complete(PROMPT)
        assert answer.choices[0].token_ids == [0, 1]
        assert [message for message in worker.messages if message.submits]
        for n, max_tokens in ((1, 81), (2, 50)):
            with pytest.raises(Overloaded, match="max_tokens"):
                await client.complete(PROMPT, n=n, max_tokens=max_tokens)
        with pytest.raises(Overloaded, match="max_tokens"):
            await client.complete(list(range(10, 111)))


async def test_what_is_too_long_to_be_granted_goes_through_the_router_on_one_quota(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("trunkline_router.request.granting.MAX_FIRST_BYTES", 50)
    (worker,) = fakes("a", answer=2)
    async with limited(worker, tokens_in_flight=100) as router, direct(router) as client:
        await client.complete(PROMPT, max_tokens=50)
        assert [message for message in worker.messages if message.submits]

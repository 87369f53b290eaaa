"""The router's side of a Grant call, whatever a client says: what it holds, and what it believes."""

import asyncio

import pytest

from tests.router.cluster import cluster, refusal, until
from tests.router.direct_rig import KEY, PROMPT, Call, Reads, Stream, Timers, arrival, direct, fakes, lost
from tests.router.tokenizer_files import VOCAB_SIZE
from trunkline.grant import GrantKeys, open_grant
from trunkline.status import OVERLOADED
from trunkline.v1.generation_pb2 import SamplingParams
from trunkline.v1.inference_pb2 import ChoiceLedger, DirectLost, DirectStarted, GenerateRequest, GrantRequest, TokenIds
from trunkline_router.access.gate.places import Bounds, sender_of
from trunkline_router.request.failover import MAX_WITHOUT_PROGRESS
from trunkline_router.request.granting import MAX_GRANTS
from trunkline_router.workers.health import Liveness
from trunkline_router.workers.link_context import LinkLimits


async def test_a_worker_that_has_nothing_to_do_for_those_it_was_granted_to_is_asked_and_not_taken_for_hung(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("trunkline_router.workers.health_watch.Liveness", lambda timeout_s: Liveness(0.04))
    workers = fakes("a")
    async with cluster(*workers, grant_key=KEY) as router:
        call = Call(router)
        await call.begin()  # and does nothing with it
        await until(lambda: workers[0].asked_for_stats >= 3)
        assert not router.connected(0).is_hung
        call.call.cancel()


async def test_a_worker_that_hangs_over_granted_work_is_noticed() -> None:
    workers = fakes("a", hangs=True)
    limits = LinkLimits(inter_token_timeout_s=0.08)
    async with cluster(*workers, grant_key=KEY, link_limits=limits) as router:
        call = Call(router)
        await call.begin()
        connected = router.connected(0)
        await until(lambda: connected.is_hung)
        assert (await refusal(router.generate(PROMPT))).reason == "NO_WORKER"
        workers[0].hangs = False
        workers[0].send_load(running=1)
        await until(lambda: not connected.is_hung)
        call.call.cancel()


async def test_grants_that_nobody_uses_hold_nothing_once_they_have_expired(monkeypatch: pytest.MonkeyPatch) -> None:
    timers = Timers(monkeypatch)
    workers = fakes("a")
    async with cluster(*workers, grant_key=KEY) as router, direct(router) as client:
        used = Stream(client)
        choice = await arrival(workers)
        choice.tokens(1)
        await used.came(1)
        connected = router.connected(0)
        await until(lambda: connected.queued_tokens == 0)
        unused = [Call(router, prompt=[*PROMPT, number]) for number in range(3)]
        for call in unused:
            await call.begin()
        assert connected.open_choices == 4
        assert connected.queued_tokens > 0
        await timers.go_off()
        assert (connected.open_choices, connected.queued_tokens) == (1, 0)
        choice.tokens(1, finish=True)
        await used.task
        for call in unused:
            call.call.cancel()


async def test_what_grants_hold_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    workers = fakes("a", "b", answer=2)
    async with cluster(*workers, grant_key=KEY) as router, direct(router) as client:
        monkeypatch.setattr("trunkline_router.request.granting.MAX_ALL_BYTES", 300)
        call = Call(router, n=3)
        assert (await call.begin()).ByteSize() > 300
        assert (await call.refused(lost(1))).reason == "NO_WORKER"
        monkeypatch.setattr("trunkline_router.request.granting.MAX_FIRST_BYTES", 300)
        await client.complete(PROMPT, n=3)
        routed = [message for worker in workers for message in worker.messages if message.submits]
        assert len(routed) == 1, "what is too long to be granted goes through the router"


async def test_a_client_that_loses_one_worker_after_the_other_is_bounded_and_judges_none() -> None:
    workers = fakes("a", "b", "c", "d", "e", "f", "g")
    async with cluster(*workers, grant_key=KEY) as router:
        for _ in range(3):
            call = Call(router)
            addresses = [(await call.begin()).worker_address]
            for _ in range(MAX_WITHOUT_PROGRESS - 1):
                addresses.append((await call.ask(lost())).worker_address)
            assert len(set(addresses)) == MAX_WITHOUT_PROGRESS
            assert (await call.refused(lost())).reason == "NO_WORKER"
        for number in range(len(workers)):
            assert router.connected(number).breaker.is_closed
            assert not router.connected(number).routed_by_load


async def test_full_workers_can_be_claimed_so_often_and_no_more() -> None:
    workers = fakes("a")
    full = DirectLost().refusal
    full.reason, full.retry_delay_ms = OVERLOADED, 0
    async with cluster(*workers, grant_key=KEY) as router:
        call = Call(router)
        await call.begin()
        for count in range(1, MAX_GRANTS):
            await call.ask(lost(*range(count), refusal=full))
        assert (await call.refused(lost(*range(MAX_GRANTS), refusal=full))).reason == OVERLOADED


@pytest.mark.parametrize(
    "claim",
    [
        lost(VOCAB_SIZE),
        lost(-1),
        lost(*[1] * 10),
        GrantRequest(lost=DirectLost(ledgers=[ChoiceLedger(choice=2)])),
        GrantRequest(lost=DirectLost(ledgers=[ChoiceLedger(choice=index, finished=True) for index in range(2)])),
        GrantRequest(request=GenerateRequest(token_ids=TokenIds(ids=PROMPT))),
        GrantRequest(),
    ],
    ids=["vocabulary", "negative", "more than max_tokens", "choice", "all finished", "a second request", "nothing"],
)
async def test_a_claim_that_cannot_be_is_refused(claim: GrantRequest) -> None:
    workers = fakes("a", "b")
    async with cluster(*workers, grant_key=KEY) as router:
        call = Call(router, n=2, sampling=SamplingParams(max_tokens=9))
        await call.begin()
        assert (await call.refused(claim)).reason == "INVALID_REQUEST"


async def test_what_a_client_once_had_it_still_has() -> None:
    workers = fakes("a", "b")
    async with cluster(*workers, grant_key=KEY) as router:
        call = Call(router)
        await call.begin()
        granted = await call.ask(lost(1, 2, 3, prompt_known=True))
        submit = open_grant(GrantKeys(KEY), granted.grants[0], epoch=1, now_unix_ms=0)
        assert list(submit.resume.output_token_ids) == [1, 2, 3]
        assert "after 3 before" in (await call.refused(lost(1, 2))).message


async def test_a_request_that_lost_a_worker_is_marked_so_that_nobody_is_convicted_in_its_place() -> None:
    workers = fakes("a", "b", "c")
    full = DirectLost().refusal
    full.reason = OVERLOADED
    async with cluster(*workers, grant_key=KEY) as router:
        call = Call(router)
        granted = [await call.begin(), await call.ask(lost(refusal=full)), await call.ask(lost())]
        call.call.cancel()
        submits = [open_grant(GrantKeys(KEY), grant, epoch=1, now_unix_ms=0) for one in granted for grant in one.grants]
        assert [submit.suspect for submit in submits] == [False, False, True]


async def test_a_call_begins_with_a_request() -> None:
    workers = fakes("a")
    async with cluster(*workers, grant_key=KEY) as router:
        assert (await Call(router).refused(GrantRequest(started=DirectStarted()))).field == "request"


async def test_a_call_that_says_nothing_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trunkline_router.edge.inference_service.FIRST_MESSAGE_S", 0.5)
    workers = fakes("a", "b")
    async with cluster(*workers, grant_key=KEY) as router:
        slow = Call(router)
        await slow.begin()
        assert (await refusal(Reads(router.stub.Grant()))).field == "request"
        assert (await slow.ask(lost())).grants, "later it may be silent"
        slow.call.cancel()


async def test_so_is_one_at_a_router_that_gives_no_grants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trunkline_router.edge.inference_service.FIRST_MESSAGE_S", 0.5)
    async with cluster(*fakes("a", grant_key=b""), grant_key=b"") as router:
        assert (await refusal(Reads(router.stub.Grant()))).reason == "FORBIDDEN"


async def test_what_follows_the_first_message_counts_as_memory_and_waits_for_its_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The gate's limits hold for every message of a call. What was read before holds nothing."""
    large = lost(*[5] * 20_000)
    async with cluster(*fakes("a", "b"), grant_key=KEY) as router:
        gate = router.gate
        call = Call(router)
        await call.begin()
        (connection,) = gate.requests._of_connection
        account = sender_of(connection).account
        gate.turns.took(account, 64 << 20)  # it is far ahead of its pace
        asking = asyncio.create_task(call.refused(large))
        await until(lambda: account in gate.turns._turns_of_accounts)
        assert "tokens are more than" in (await asking).message
        call = Call(router)
        await call.begin()
        monkeypatch.setattr(gate.held, "_bounds", Bounds(in_all=1, of_host=1, of_connection=1, of_tenant=1))
        assert (await call.refused(large)).reason == OVERLOADED
        await until(lambda: not gate.reading._places.num_held and not gate.held.num_held)

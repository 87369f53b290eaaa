"""The direct path: the router chooses and signs, the client streams from the worker, and nobody is worse off."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc
import pytest

from tests.router.cluster import Cluster, cluster, refusal, router_before, until
from tests.router.fake_worker import WORKER_DRAINS, FakeChoice, FakeWorker
from tests.router.tokenizer_files import VOCAB_SIZE
from trunkline import Client
from trunkline.client import Piece
from trunkline.errors import (
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    NoWorker,
    Overloaded,
    Quarantined,
    TrunklineError,
)
from trunkline.grant import LIFETIME_S, open_grant
from trunkline.status import (
    CODE_INTERNAL,
    CODE_RESOURCE_EXHAUSTED,
    INTERNAL,
    OVERLOADED,
    RequestRefused,
    no_worker,
)
from trunkline.v1.generation_pb2 import Lane, SamplingParams
from trunkline.v1.inference_pb2 import (
    ChoiceLedger,
    DirectLost,
    DirectStarted,
    GenerateRequest,
    GrantRequest,
    GrantResponse,
    TokenIds,
)
from trunkline.v1.worker_pb2 import Resume
from trunkline_router.failover import MAX_WITHOUT_PROGRESS, FailoverLimits
from trunkline_router.grant_charge import CLOCK_MARGIN_S, GrantCharge
from trunkline_router.granting import MAX_GRANTS
from trunkline_router.link_context import LinkLimits
from trunkline_router.main import router_settings
from trunkline_router.signs_of_life import SignsOfLife
from trunkline_router.tenants import Tenant, Tenants

KEY = b"a key of thirty-two bytes, or so"
PROMPT = list(range(10, 30))

CALL_TIMEOUT_S = 20.0


def fakes(*names: str, **fields: Any) -> list[FakeWorker]:
    return [FakeWorker(name, **{"answer": None, "grant_key": KEY, **fields}) for name in names]


def direct(router: Cluster, **options: Any) -> Client:
    return Client(f"127.0.0.1:{router.port}", direct=True, **options)


class Stream:
    """A request of a direct client, read in the background."""

    def __init__(self, client: Client, prompt: list[int] = PROMPT, **options: Any) -> None:
        self.pieces: list[Piece] = []
        self.task = asyncio.create_task(self._read(client.generate(prompt, **options)))

    async def _read(self, pieces: Any) -> list[Piece]:
        async for piece in pieces:
            self.pieces.append(piece)
        return self.pieces

    def tokens(self, index: int = 0) -> list[int]:
        return [token for piece in self.pieces if piece.index == index for token in piece.token_ids]

    async def came(self, tokens: int) -> None:
        await until(lambda: sum(len(piece.token_ids) for piece in self.pieces) == tokens)


async def arrival(workers: list[FakeWorker]) -> FakeChoice:
    """The next choice, at whichever worker."""
    await until(lambda: any(not worker.arrived.empty() for worker in workers))
    return next(worker.arrived for worker in workers if not worker.arrived.empty()).get_nowait()


async def choices(workers: list[FakeWorker], count: int) -> list[FakeChoice]:
    """The next ones, in the order of their numbers: each comes on a stream of its own."""
    return sorted([await arrival(workers) for _ in range(count)], key=lambda choice: choice.submit.choice)


class Call:
    """A Grant call that says what the test makes it say."""

    def __init__(self, router: Cluster, prompt: list[int] = PROMPT, **fields: Any) -> None:
        self.call = router.stub.Grant(timeout=CALL_TIMEOUT_S)
        self.first = GrantRequest(request=GenerateRequest(token_ids=TokenIds(ids=prompt), **fields))

    async def begin(self) -> GrantResponse:
        return await self.ask(self.first)

    async def ask(self, message: GrantRequest) -> GrantResponse:
        await self.call.write(message)
        answer = await self.call.read()
        assert answer is not grpc.aio.EOF
        granted: GrantResponse = answer
        return granted

    async def refused(self, message: GrantRequest) -> Any:
        await self.call.write(message)
        return await refusal(_Reads(self.call))


class Timers:
    """Of grants: they go off when the test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._set: list[_Timer] = []
        monkeypatch.setattr("trunkline_router.service.GrantCharge", partial(GrantCharge, later=self._later))

    def _later(self, delay_s: float, call: Callable[[], None]) -> "_Timer":
        self._set.append(_Timer(delay_s, call))
        return self._set[-1]

    async def go_off(self, delay_s: float) -> None:
        """Those that are set, or about to be, to about so long: a deadline was nearer, or is a rounding further."""

        def due() -> list[_Timer]:
            return [timer for timer in self._set if delay_s - 5.0 < timer.delay_s < delay_s + 1.0]

        await until(lambda: bool(due()))
        timers = due()
        self._set = [timer for timer in self._set if timer not in timers]
        for timer in timers:
            if not timer.is_cancelled:
                timer.call()


@dataclass(eq=False)
class _Timer:
    delay_s: float
    call: Callable[[], None]
    is_cancelled: bool = False

    def cancel(self) -> None:
        self.is_cancelled = True


class _Reads:
    """What refusal() takes, of a call that is written to as well."""

    def __init__(self, call: Any) -> None:
        self._call = call

    def __await__(self) -> Any:
        return self._call.read().__await__()


def lost(*token_ids: int, **fields: Any) -> GrantRequest:
    output = Resume(output_token_ids=token_ids, text_bytes_sent=len(token_ids))
    return GrantRequest(lost=DirectLost(ledgers=[ChoiceLedger(output=output)] if token_ids else [], **fields))


async def test_an_answer_streams_from_the_worker_and_reads_as_the_routers_would() -> None:
    (worker,) = fakes("a", answer=3)
    async with cluster(worker, grant_key=KEY) as router, direct(router) as client:
        answers = [await c.complete(PROMPT, seed=5) for c in (client, client)]
        assert not [message for message in worker.messages if message.submits], "the router sent nothing"
        async with Client(f"127.0.0.1:{router.port}") as routed:
            expected = await routed.complete(PROMPT, seed=5)
        assert len(worker.submits) == 3
    (first, second) = answers
    assert second.choices == expected.choices
    assert second.prompt == expected.prompt
    assert second.usage == expected.usage
    assert first.prompt.cached_tokens == 0
    assert second.prompt.cached_tokens > 0


async def test_what_the_worker_computes_is_what_the_router_made_of_the_request() -> None:
    (worker,) = fakes("a", answer=1, default_sampling=SamplingParams(top_k=7))
    tenants = Tenants({"acme": Tenant(weight=3.0, cap=Lane.LANE_BATCH)})
    async with cluster(worker, grant_key=KEY, tenants=tenants) as router, direct(router, tenant="acme") as client:
        await client.complete(PROMPT, lane="interactive", max_tokens=9, request_id="r-1", timeout_s=15.0)
    (submit,) = worker.submits
    assert (submit.tenant, submit.tenant_weight, submit.lane) == ("acme", 3.0, Lane.LANE_BATCH)
    assert (submit.sampling.max_tokens, submit.sampling.top_k, submit.request_id) == (9, 7, "r-1")
    assert submit.cache_salt == b"tenant\0acme"
    assert submit.sampling.HasField("seed")
    assert 0 < submit.timeout.ToSeconds() <= 15


async def test_a_request_counts_at_its_worker_for_as_long_as_it_runs_there() -> None:
    workers = fakes("a")
    async with cluster(*workers, grant_key=KEY) as router, direct(router) as client:
        stream = Stream(client, n=2)
        zero, one = await choices(workers, 2)
        live = router.live(0)
        assert (live.open_choices, live.queued_tokens) == (2, len(PROMPT))
        one.tokens(1)
        zero.tokens(2)
        await until(lambda: live.queued_tokens == 0)
        assert live.open_choices == 2
        one.tokens(1, finish=True)
        zero.tokens(1, finish=True)
        await stream.task
        await until(lambda: live.open_choices == 0)
    assert (stream.tokens(0), stream.tokens(1)) == ([0, 1, 2], [0, 1])
    assert stream.pieces[0].response.HasField("prompt"), "what is told of the prompt comes first"
    assert [piece.response.HasField("usage") for piece in stream.pieces].index(True) == len(stream.pieces) - 1
    assert stream.pieces[-1].response.usage.completion_tokens == 5


async def test_a_stream_goes_on_at_another_worker_from_what_has_come() -> None:
    workers = fakes("a", "b")
    async with cluster(*workers, grant_key=KEY) as router, direct(router) as client:
        stream = Stream(client, max_tokens=9, prompt_logprobs=1)
        choice = await arrival(workers)
        choice.tokens(3, text="späť")
        await stream.came(3)
        await choice.worker.die()
        resumed = await arrival(workers)
        resumed.tokens(2, text="...", finish=True)
        await stream.task
    assert resumed.worker is not choice.worker
    assert stream.tokens() == [0, 1, 2, 3, 4], "none lost, none twice"
    submit = resumed.submit
    assert (list(submit.resume.output_token_ids), submit.resume.text_bytes_sent) == ([0, 1, 2], 6)
    assert submit.sampling.seed == choice.submit.sampling.seed
    assert not submit.sampling.HasField("prompt_logprobs"), "they were told"
    usage = stream.pieces[-1].response.usage
    assert (usage.resumptions, usage.completion_tokens) == (1, 5)


async def test_choices_that_have_ended_are_not_computed_again() -> None:
    workers = fakes("a", "b")
    async with cluster(*workers, grant_key=KEY) as router, direct(router) as client:
        stream = Stream(client, n=3)
        at_first = await choices(workers, 3)
        at_first[0].tokens(2, finish=True)
        at_first[1].tokens(4)
        await stream.came(6)
        at_first[2].fail(WORKER_DRAINS)
        one, two = await choices(workers, 2)
        assert (one.submit.choice, two.submit.choice) == (1, 2)
        assert not two.submit.HasField("resume"), "it had said nothing"
        one.tokens(1, finish=True)
        two.tokens(3, finish=True)
        await stream.task
    assert [stream.tokens(index) for index in range(3)] == [[0, 1], [0, 1, 2, 3, 4], [0, 1, 2]]


async def test_a_full_worker_sends_the_client_to_another_one() -> None:
    workers = fakes("a", "b")
    async with cluster(*workers, grant_key=KEY) as router, direct(router) as client:
        stream = Stream(client)
        full = await arrival(workers)
        full.fail(RequestRefused(CODE_RESOURCE_EXHAUSTED, OVERLOADED, "full", retry_delay_ms=500))
        other = await arrival(workers)
        assert other.worker is not full.worker
        other.fail(RequestRefused(CODE_RESOURCE_EXHAUSTED, OVERLOADED, "full", retry_delay_ms=700))
        with pytest.raises(Overloaded) as caught:
            await stream.task
    assert caught.value.retry_after_s == 0.5, "the first one to have room"


async def test_a_worker_that_was_restarted_meanwhile_takes_no_old_grant_and_the_client_asks_for_another() -> None:
    workers = fakes("a", "b", answer=2)
    failover = FailoverLimits(patience_s=0.05)
    async with cluster(*workers, grant_key=KEY, failover=failover) as router, direct(router) as client:
        router.live(0).model.epoch = router.live(1).model.epoch = 99  # as both were before
        with pytest.raises(NoWorker):
            await client.complete(PROMPT)
        assert not workers[0].submits
        assert not workers[1].submits
        router.live(1).model.epoch = workers[1].epoch
        assert (await client.complete(PROMPT)).prompt.worker_id == "b"


async def test_a_request_that_was_refused_for_itself_is_not_tried_again() -> None:
    workers = fakes("a", "b")
    async with cluster(*workers, grant_key=KEY) as router, direct(router) as client:
        stream = Stream(client)
        (await arrival(workers)).fail(RequestRefused(CODE_INTERNAL, INTERNAL, "a bug"))
        with pytest.raises(InternalError):
            await stream.task
        with pytest.raises(InvalidRequest) as caught:
            await client.complete(PROMPT, temperature=-1.0)
        assert caught.value.field == "sampling.temperature"
        assert sum(len(worker.submits) for worker in workers) == 1


async def test_a_client_that_leaves_ends_everything_at_once() -> None:
    workers = fakes("a")
    async with cluster(*workers, grant_key=KEY) as router:
        async with direct(router) as client:
            pieces: Any = client.generate(PROMPT, n=2)
            reading = asyncio.create_task(anext(pieces))
            zero, _ = await choices(workers, 2)
            zero.tokens(1)
            await reading
            assert router.live(0).open_choices == 2
            await pieces.aclose()
            await until(lambda: len(workers[0].aborted) == 2 and router.live(0).open_choices == 0)
        gone = direct(router)
        stream = Stream(gone)
        await arrival(workers)
        await gone.close()
        with pytest.raises(TrunklineError, match="closed"):
            await stream.task
        await until(lambda: len(workers[0].aborted) == 3 and router.live(0).open_choices == 0)


async def test_a_deadline_holds_at_the_worker_and_at_the_router() -> None:
    workers = fakes("a")
    async with cluster(*workers, grant_key=KEY) as router, direct(router) as client:
        with pytest.raises(DeadlineExceeded):
            await client.complete(PROMPT, timeout_s=1.0)
        await until(lambda: len(workers[0].aborted) == 1 and router.live(0).open_choices == 0)
        await workers[0].die()
        await router.until_workers(False)


async def test_an_answer_that_has_begun_survives_the_end_of_the_router() -> None:
    workers = fakes("a")
    for worker in workers:
        await worker.start()
    async with router_before(*workers, grant_key=KEY) as router:
        client = direct(router, inter_token_timeout_s=0.02)
        stream = Stream(client)
        choice = await arrival(workers)
        choice.tokens(1)
        await stream.came(1)
    choice.tokens(2, finish=True)
    await stream.task
    assert stream.tokens() == [0, 1, 2]
    await client.close()
    await workers[0].die()


async def test_a_worker_that_has_nothing_to_do_for_those_it_was_granted_to_is_asked_and_not_taken_for_hung(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("trunkline_router.worker_health.SignsOfLife", lambda timeout_s: SignsOfLife(0.04))
    workers = fakes("a")
    async with cluster(*workers, grant_key=KEY) as router:
        call = Call(router)
        await call.begin()  # and does nothing with it
        await until(lambda: workers[0].asked_for_stats >= 3)
        assert not router.live(0).is_hung
        call.call.cancel()


async def test_a_worker_that_hangs_over_granted_work_is_noticed() -> None:
    workers = fakes("a", hangs=True)
    limits = LinkLimits(inter_token_timeout_s=0.08)
    async with cluster(*workers, grant_key=KEY, link_limits=limits) as router:
        call = Call(router)
        await call.begin()
        live = router.live(0)
        await until(lambda: live.is_hung)
        assert (await refusal(router.generate(PROMPT))).reason == "NO_WORKER"
        workers[0].hangs = False
        workers[0].send_load(running=1)
        await until(lambda: not live.is_hung)
        call.call.cancel()


async def test_grants_that_nobody_uses_hold_nothing_once_they_have_expired(monkeypatch: pytest.MonkeyPatch) -> None:
    timers = Timers(monkeypatch)
    workers = fakes("a")
    async with cluster(*workers, grant_key=KEY) as router, direct(router) as client:
        used = Stream(client)
        choice = await arrival(workers)
        choice.tokens(1)
        await used.came(1)
        live = router.live(0)
        await until(lambda: live.queued_tokens == 0)
        unused = [Call(router, prompt=[*PROMPT, number]) for number in range(3)]
        for call in unused:
            await call.begin()
        assert live.open_choices == 4
        assert live.queued_tokens > 0
        await timers.go_off(LIFETIME_S + CLOCK_MARGIN_S)
        assert (live.open_choices, live.queued_tokens) == (1, 0)
        choice.tokens(1, finish=True)
        await used.task
        for call in unused:
            call.call.cancel()


async def test_where_no_grants_are_given_or_taken_answers_come_through_the_router(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for router_key, worker_key in ((b"", b""), (KEY, b"")):
        (worker,) = fakes("a", answer=2, grant_key=worker_key)
        async with cluster(worker, grant_key=router_key) as router, direct(router) as client:
            caplog.clear()
            for _ in range(2):
                assert (await client.complete(PROMPT)).choices[0].token_ids == [0, 1]
            assert [record.getMessage() for record in caplog.records if "--grant-key" in record.getMessage()] != []
            assert len([record for record in caplog.records if record.name == "trunkline.direct"]) == 1
            assert len([message for message in worker.messages if message.submits]) == 2
        assert KEY.decode() not in caplog.text


@pytest.mark.parametrize("router_key", [b"", KEY[::-1]])
async def test_a_worker_with_another_key_is_left_alone_and_says_why(router_key: bytes) -> None:
    workers = [*fakes("a", answer=1), *fakes("b", answer=1, grant_key=router_key)]
    async with cluster(*workers, grant_key=router_key, expected=(False, True)) as router:
        for _ in range(4):
            assert (await router.answer(PROMPT))[0].prompt.worker_id == "b"
        await until(lambda: "--grant-key" in router.links[0].problem)


async def test_a_worker_that_refuses_a_routers_proof_is_left_alone_and_its_reason_told_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    workers = [*fakes("a", clock_ahead_s=60.0), *fakes("b", answer=1)]
    async with cluster(*workers, grant_key=KEY, expected=(False, True)) as router:
        await until(lambda: workers[0].asked >= 3)
        assert "too long ago: the clocks must agree" in router.links[0].problem
        assert (await router.answer(PROMPT))[0].prompt.worker_id == "b"
    assert capsys.readouterr().out.count("the clocks must agree") == 1


async def test_what_grants_hold_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    workers = fakes("a", "b", answer=2)
    async with cluster(*workers, grant_key=KEY) as router, direct(router) as client:
        monkeypatch.setattr("trunkline_router.granting.MAX_ALL_BYTES", 300)
        call = Call(router, n=3)
        assert (await call.begin()).ByteSize() > 300
        assert (await call.refused(lost(1))).reason == "NO_WORKER"
        monkeypatch.setattr("trunkline_router.granting.MAX_FIRST_BYTES", 300)
        await client.complete(PROMPT, n=3)
        routed = [message for worker in workers for message in worker.messages if message.submits]
        assert len(routed) == 1, "what is too long to be granted goes through the router"


def test_a_key_that_can_be_guessed_starts_nothing_and_is_not_shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRUNKLINE_GRANT_KEY", "hunter2")
    with pytest.raises(SystemExit) as caught:
        router_settings(["--workers=127.0.0.1:1"])
    said = capsys.readouterr().err
    assert (caught.value.code, said.count("\n")) == (2, 1)
    assert "--grant-key" in said
    assert "hunter2" not in said


async def test_only_workers_with_the_routers_key_are_granted() -> None:
    workers = [*fakes("a", "b", answer=1, grant_key=b""), *fakes("c", answer=1)]
    async with cluster(*workers, grant_key=KEY) as router, direct(router) as client:
        for _ in range(6):
            assert (await client.complete(PROMPT)).prompt.worker_id == "c"


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
            assert router.live(number).breaker.is_closed
            assert not router.live(number).routed_by_load


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
        submit = open_grant(KEY, granted.grants[0], epoch=1, now_unix_ms=0)
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
        submits = [open_grant(KEY, grant, epoch=1, now_unix_ms=0) for one in granted for grant in one.grants]
        assert [submit.suspect for submit in submits] == [False, False, True]


async def test_what_was_convicted_on_the_routed_path_is_not_granted() -> None:
    workers = fakes("a", "b")
    async with cluster(*workers, grant_key=KEY) as router, direct(router) as client:
        call = router.generate(PROMPT, sampling=SamplingParams(max_tokens=9))
        for sole in (False, True):
            (await arrival(workers)).fail(no_worker("the engine died"), suspect=True, sole_suspect=sole)
        assert (await refusal(call)).reason == "QUARANTINED"
        with pytest.raises(Quarantined):
            await client.complete(PROMPT, max_tokens=9)


async def test_a_call_begins_with_a_request() -> None:
    workers = fakes("a")
    async with cluster(*workers, grant_key=KEY) as router:
        assert (await Call(router).refused(GrantRequest(started=DirectStarted()))).field == "request"


async def test_a_call_that_says_nothing_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trunkline_router.service.FIRST_MESSAGE_S", 0.5)
    workers = fakes("a", "b")
    async with cluster(*workers, grant_key=KEY) as router:
        slow = Call(router)
        await slow.begin()
        assert (await refusal(_Reads(router.stub.Grant()))).field == "request"
        assert (await slow.ask(lost())).grants, "later it may be silent"
        slow.call.cancel()


async def test_a_wait_for_a_worker_is_bounded() -> None:
    workers = fakes("a")
    failover = FailoverLimits(patience_s=0.05)
    async with cluster(*workers, grant_key=KEY, failover=failover) as router, direct(router) as client:
        stream = Stream(client)
        choice = await arrival(workers)
        choice.tokens(2)
        await stream.came(2)
        await workers[0].die()
        with pytest.raises(NoWorker):
            await stream.task

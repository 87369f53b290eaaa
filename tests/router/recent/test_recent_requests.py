"""Recent requests, over real gRPC and HTTP: who finds which, and what is told of them."""

import asyncio
from dataclasses import replace
from typing import Any

import grpc
import pytest

from tests.router.cluster import cluster, refusal
from tests.router.fake_worker import FakeWorker
from tests.router.watch.watch_rig import ACME, BLIND, OPERATOR, OTHER, SCRAPER, KeyRing, ids, watched_router
from trunkline.v1.fleet_pb2 import GetRequestRequest, ListRequestsRequest
from trunkline.v1.generation_pb2 import SamplingParams
from trunkline.v1.inference_pb2 import TokenIds
from trunkline_router.access.access import Access, Tenant, Tenants
from trunkline_router.observe.recent import router_requests
from trunkline_router.observe.recent.recent_requests import KEPT, RecentRequests, RecordRing, ShownRequest
from trunkline_router.observe.recent.viewer import Viewer
from trunkline_router.quotas.quota import Quotas
from trunkline_router.record.request_observer import RequestObserver
from trunkline_router.record.request_record import CANCELLED, RequestRecord

PROMPT = "a prompt that no list may show"


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> KeyRing:
    return KeyRing(tmp_path_factory.mktemp("keys"))


async def listed(router: Any, keys: KeyRing, who: str, **asked: Any) -> Any:
    metadata = tuple(keys.headers(who).items())
    return (await router.fleet.ListRequests(ListRequestsRequest(**asked), metadata=metadata)).requests


async def test_a_request_is_found_by_its_id_with_its_whole_way() -> None:
    a, b = FakeWorker("a"), FakeWorker("b")
    async with cluster(a, b) as router:
        await router.answer(list(range(64)), request_id="known", sampling=SamplingParams(max_tokens=2))
        told = await router.fleet.GetRequest(GetRequestRequest(request_id="known"))
        summary = told.summary
        assert (summary.request_id, summary.model, summary.outcome) == ("known", "tiny", "length")
        assert (summary.prompt_tokens, summary.completion_tokens, summary.attempts) == (64, 2, 1)
        (placement,), (attempt,) = told.placements, told.attempts_made
        assert placement.worker_id == attempt.worker_id == summary.worker_id
        assert placement.candidates[0].worker_id == placement.worker_id
        assert {candidate.worker_id for candidate in placement.candidates} == {"a", "b"}
        assert placement.predicted_ttft_s == pytest.approx(placement.candidates[0].cost_s)
        assert attempt.ended == "complete"
        assert sum(part.duration_s for part in told.ttft_parts) == pytest.approx(summary.ttft_s)
        assert len(told.trace_id) == 32


async def test_a_request_that_moved_to_another_worker_tells_of_both() -> None:
    workers = [FakeWorker("a", answer=None), FakeWorker("b", answer=None)]
    workers[1].arrived = workers[0].arrived
    async with cluster(*workers) as router:
        answer = asyncio.create_task(router.answer([1, 2, 3], request_id="moved"))
        first = await workers[0].arrived.get()
        await first.worker.die()
        second = await workers[0].arrived.get()
        second.tokens(2, finish=True)
        await answer
        told = await router.fleet.GetRequest(GetRequestRequest(request_id="moved"))
        made = told.attempts_made
        assert [attempt.worker_id for attempt in made] == [first.worker.worker_id, second.worker.worker_id]
        assert made[0].problem
        assert (made[0].ended, made[1].ended) == ("NO_WORKER", "complete")
        assert "failover" in {part.part for part in told.ttft_parts}
        notable = await router.fleet.ListRequests(ListRequestsRequest(notable=True))
        assert ids(notable.requests) == ["moved"]


async def test_a_request_that_has_not_ended_tells_how_far_it_is(keys: KeyRing) -> None:
    worker = FakeWorker("a", answer=None)
    async with watched_router(keys, worker) as router:
        answer = asyncio.create_task(router.generate(keys.headers(ACME), text=PROMPT, request_id="stuck"))
        choice = await worker.arrived.get()
        metadata = tuple(keys.headers(ACME).items())
        told = await router.fleet.GetRequest(GetRequestRequest(request_id="stuck"), metadata=metadata)
        assert (told.summary.is_running, told.summary.outcome) == (True, "")
        assert not told.summary.HasField("ttft_s")
        assert told.summary.e2e_s > 0
        assert (told.attempts_made[0].worker_id, told.attempts_made[0].ended) == ("a", "")
        assert told.ttft_parts[-1].part == "worker"
        assert sum(part.duration_s for part in told.ttft_parts) == pytest.approx(told.summary.e2e_s)
        assert ids(await listed(router, keys, ACME, running=True)) == ["stuck"]
        assert not await listed(router, keys, OTHER, running=True)
        assert not await listed(router, keys, ACME)
        choice.tokens(2, finish=True)
        await answer
        assert not await listed(router, keys, ACME, running=True)
        (ended,) = await listed(router, keys, ACME)
        assert (ended.is_running, ended.outcome) == (False, "length")


async def test_other_tenants_requests_do_not_exist(keys: KeyRing) -> None:
    async with watched_router(keys, FakeWorker("a")) as router:
        for who in (ACME, OTHER):
            await router.generate(keys.headers(who), text=PROMPT, request_id=f"of-{who}")
        assert ids(await listed(router, keys, OPERATOR)) == ["of-other", "of-acme"]
        assert ids(await listed(router, keys, OPERATOR, tenant="acme")) == ["of-acme"]
        assert ids(await listed(router, keys, OPERATOR, limit=1)) == ["of-other"]
        for who, others in ((ACME, OTHER), (OTHER, ACME)):
            assert ids(await listed(router, keys, who)) == [f"of-{who}"]
            assert not await listed(router, keys, who, tenant=others)
            metadata = tuple(keys.headers(who).items())
            refusals = []
            for request_id in (f"of-{others}", "of-none"):
                call = router.fleet.GetRequest(GetRequestRequest(request_id=request_id), metadata=metadata)
                refused = await refusal(call)
                assert (refused.code, refused.reason) == (grpc.StatusCode.NOT_FOUND, "REQUEST_NOT_FOUND")
                refusals.append(refused.message.replace(request_id, ""))
            assert refusals[0] == refusals[1], "a request of another tenant does not differ from one that is none"
        refused = await refusal(
            router.fleet.ListRequests(ListRequestsRequest(), metadata=tuple(keys.headers(SCRAPER).items()))
        )
        assert refused.reason == "FORBIDDEN"


async def test_users_are_not_told_what_depends_on_the_requests_of_others(keys: KeyRing) -> None:
    async with watched_router(keys, FakeWorker("a"), FakeWorker("b")) as router:
        await router.generate(keys.headers(ACME), token_ids=TokenIds(ids=range(64)), request_id="own")

        async def told(who: str) -> Any:
            metadata = tuple(keys.headers(who).items())
            return await router.fleet.GetRequest(GetRequestRequest(request_id="own"), metadata=metadata)

        of_operator, of_user, of_blind = [await told(who) for who in (OPERATOR, ACME, BLIND)]
        assert of_operator.placements[0].candidates
        assert of_operator.placements[0].reason
        assert not of_user.placements[0].candidates
        assert not of_user.placements[0].reason
        assert of_operator.placements[0].HasField("predicted_ttft_s")
        assert not of_user.placements[0].HasField("predicted_ttft_s"), "it has terms of the requests of others"
        assert of_user.placements[0].worker_id == of_operator.placements[0].worker_id
        assert of_user.summary.HasField("cached_tokens")
        assert (len(of_blind.placements), len(of_blind.attempts_made)) == (0, 0)
        assert not of_blind.summary.HasField("cached_tokens")
        assert not any(part.note for part in of_blind.ttft_parts)


async def test_neither_lists_nor_timelines_have_content(keys: KeyRing) -> None:
    async with watched_router(keys, FakeWorker("a")) as router:
        await router.generate(keys.headers(ACME), text=PROMPT, request_id="own")
        for path in ("/fleet/requests", "/fleet/requests/own"):
            body = (await router.http.get(path, headers=keys.headers(OPERATOR))).text
            assert "own" in body
            assert PROMPT not in body
            assert "xxx" not in body, "the answer"
            assert keys.of[ACME] not in body


async def test_refusals_for_quotas_are_counted_by_tenant(keys: KeyRing) -> None:
    tenants = Tenants({"acme": Tenant(quotas=Quotas(requests_per_minute=1))})
    async with watched_router(keys, FakeWorker("a"), tenants=tenants) as router:
        await router.generate(keys.headers(ACME), text="a")
        assert (await router.refused(keys.headers(ACME), text="b")).reason == "QUOTA_EXCEEDED"
        async with router.http.stream("GET", "/fleet/events", headers=keys.headers(ACME)) as response:
            lines = aiter(response.aiter_lines())
            await anext(lines)
            assert '"refused":1' in await anext(lines)
        assert [entry.outcome for entry in await listed(router, keys, ACME, notable=True)] == ["QUOTA_EXCEEDED"]


def record(tenant: str, number: int) -> RequestRecord:
    made = RequestRecord(f"{tenant}-{number}", 0.0, 0)
    made.tenant = tenant
    return made


def test_a_look_at_running_requests_works_out_those_alone_that_it_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    class Counted(ShownRequest):
        def __init__(self, record: RequestRecord, now_s: float | None = None) -> None:
            made.append(record.request_id)
            super().__init__(record, now_s)

    monkeypatch.setattr(router_requests, "ShownRequest", Counted)
    running = {number: record("acme" if number in (7, 900) else "other", number) for number in range(1000)}
    book = router_requests.RouterRequests(RecentRequests(), running, clock_s=lambda: 1.0)
    acme = replace(Viewer.of(Access().caller(())), tenant="acme", is_operator=False)
    assert ids(book.list_here(acme, [router_requests.Kind.RUNNING], 10)) == made == ["acme-7", "acme-900"]
    made.clear()
    assert book.find_here(acme, "acme-900") is not None
    assert book.find_here(acme, "other-3") is None
    assert made == ["acme-900", "other-3"]


def ended(tenant: str, number: int, ended_s: float, outcome: str = "stop") -> RequestRecord:
    made = record(tenant, number)
    made.ended_s, made.outcome = ended_s, outcome
    return made


def kept(ring: RecordRing) -> list[str]:
    return [ended.record.request_id for ended in ring.newest_first()]


def test_a_busy_tenant_does_not_displace_the_requests_of_others() -> None:
    ring = RecordRing(8)
    for number in range(3):
        ring.add(record("quiet", number))
    for number in range(100):
        ring.add(record("busy", number))
    assert [name for name in kept(ring) if name.startswith("quiet")] == ["quiet-2", "quiet-1", "quiet-0"]
    assert kept(ring)[:5] == [f"busy-{number}" for number in range(99, 94, -1)]
    for number in range(3, 100):
        ring.add(record("quiet", number))
    assert sorted(name.split("-")[0] for name in kept(ring)) == ["busy"] * 4 + ["quiet"] * 4
    assert len(ring) == 8


def kept_of(recent: RecentRequests, tenant: str) -> int:
    return sum(told.record.tenant == tenant for told in recent.newest_first())


def test_of_a_tenant_that_ends_many_requests_a_part_is_kept_and_others_find_room() -> None:
    recent, per_s = RecentRequests(slow_s=0.5), 1000
    for number in range(2 * per_s):
        recent.request_ended(ended("busy", number, number / per_s))
        if number % per_s == 0:
            recent.request_ended(ended("quiet", number, number / per_s))
    free = KEPT.at_once - KEPT.reserve
    assert free < kept_of(recent, "busy") < free + KEPT.account_at_once + 2 * KEPT.per_s
    assert kept_of(recent, "quiet") == 2


def test_a_batch_that_ends_in_one_step_is_kept_as_a_whole() -> None:
    """Also of a tenant that has ended many requests before."""
    recent = RecentRequests(slow_s=0.5)
    for number in range(1000):
        recent.request_ended(ended("acme", number, 0.001 * number))
    for number in range(1000, 1100):
        recent.request_ended(ended("acme", number, 60.0))
    names = {told.record.request_id for told in recent.newest_first()}
    assert {f"acme-{number}" for number in range(1000, 1100)} <= names


def test_cancelled_requests_are_kept_in_any_case() -> None:
    """They are told of a little late, when their workers have answered."""
    recent = RecentRequests(slow_s=0.5)
    for number in range(500):
        recent.request_ended(ended("acme", number, 1.0))
    before = kept_of(recent, "acme")
    for number in range(9):
        recent.request_ended(ended("acme", 900 + number, 0.99, outcome=CANCELLED))
    assert before < 500
    assert kept_of(recent, "acme") == before + 9


def test_a_slow_request_of_a_busy_tenant_is_kept_in_any_case() -> None:
    recent = RecentRequests(slow_s=0.5)
    for number in range(500):
        recent.request_ended(ended("busy", number, 10.0))
    slow = ended("busy", 999, 10.0)
    slow.first_token_s = slow.started_s + 0.6
    recent.request_ended(slow)
    assert next(recent.newest_first(only_notable=True)).record.request_id == "busy-999"


async def test_plans_are_forgotten_and_candidates_and_decisions_are_not() -> None:
    """A plan has a row for each worker of the model: of a large fleet it is large."""
    seen: list[RequestRecord] = []

    class Keeper(RecentRequests):
        def request_ended(self, record: RequestRecord) -> None:
            super().request_ended(record)
            seen.append(record)

    recent = Keeper()
    async with cluster(
        FakeWorker("a"), FakeWorker("b"), observer=RequestObserver(listeners=[recent.request_ended])
    ) as router:
        for number in range(4):
            await router.answer([1, 2, 3], request_id=str(number))
    placements = [placement for record in seen for placement in record.placements]
    assert [placement.plan for placement in placements] == [None] * 4
    assert [len(placement.candidates) for placement in placements] == [2] * 4
    assert {placement.worker for placement in placements} <= {"a", "b"}
    assert len(list(recent.newest_first())) == 4

"""What operators are told of a router's fleet, over real gRPC."""

from typing import Any, cast

import grpc
import pytest
from structlog.testing import capture_logs

from tests.router.cluster import Cluster, cluster, refusal, until
from tests.router.direct_rig import KEY, Reads
from tests.router.fake_worker import FakeWorker
from trunkline.v1 import fleet_pb2
from trunkline.v1.fleet_pb2 import ExplainRouteRequest, ExplainRouteResponse, ListWorkersRequest
from trunkline.v1.generation_pb2 import Lane
from trunkline.v1.inference_pb2 import GenerateRequest, GrantRequest, TokenIds
from trunkline.v1.worker_pb2 import LoadSample
from trunkline_router.edge.fleet_service import about, shown_load
from trunkline_router.routing.route_request import PolicyName

PROMPT = list(range(64))


async def explain(router: Cluster, prompt: Any, *, session: str = "", **fields: Any) -> ExplainRouteResponse:
    request = ExplainRouteRequest(request=GenerateRequest(token_ids=TokenIds(ids=prompt), **fields))
    metadata = (("x-trunkline-session", session),) if session else ()
    response: ExplainRouteResponse = await router.fleet.ExplainRoute(request, metadata=metadata)
    return response


async def test_leased_workers_that_could_not_be_connected_are_listed_with_the_problem() -> None:
    async with cluster(FakeWorker("a")) as router:
        pools, own = router.inference.preparer.pools, router.links[0].address
        pools.set_aside |= {"192.0.2.1:50061": "not on the loopback interface", own: "connected by now"}
        listed = (await router.fleet.ListWorkers(ListWorkersRequest())).workers
    assert [(worker.address, worker.problem) for worker in listed] == [
        (own, ""), ("192.0.2.1:50061", "not on the loopback interface"),
    ]  # fmt: skip
    assert listed[1].state == fleet_pb2.WORKER_STATE_CONNECTING


@pytest.mark.parametrize("policy", list(PolicyName))
async def test_a_route_is_explained_as_it_will_be_taken_and_nothing_changes(policy: PolicyName) -> None:
    workers = [FakeWorker(name) for name in "abcd"]
    async with cluster(*workers, policy=policy) as router:
        for n in range(12):
            prompt = [n, *PROMPT]
            told = await explain(router, prompt)
            assert await explain(router, prompt) == told, "asking changes nothing"
            before = sum(len(worker.submits) for worker in workers)
            answer = await router.answer(prompt)
            assert answer[0].prompt.worker_id == told.worker_id
            assert sum(len(worker.submits) for worker in workers) == before + 1
            assert (told.policy, told.model, told.prompt_tokens) == (policy, "tiny", 65)
            assert [candidate.worker_id for candidate in told.candidates] == ["a", "b", "c", "d"]


async def test_an_explanation_gives_matched_tokens_cost_terms_and_the_reason() -> None:
    a, b = FakeWorker("a"), FakeWorker("b")
    b.cached.update(b.hashes(PROMPT))
    async with cluster(a, b) as router:
        a.send_load(running=3, waiting=1, waiting_by_lane=[0, 0, 1], uncached_tokens_by_lane=[0, 100, 300])
        await until(lambda: router.connected(0).load.running == 3)
        told = await explain(router, [*PROMPT, 1])
        of_a, of_b = told.candidates
        assert told.worker_id == "b"
        assert told.reason.endswith("sooner than anywhere else")
        assert (of_a.matched_tokens, of_b.matched_tokens) == (0, 64)
        assert (of_a.queued_tokens, of_a.running) == (100, 4)
        terms = (
            of_a.queue_s
            + of_a.prefill_s
            + of_a.decode_s
            + of_a.kv_wait_s
            + of_a.kv_penalty_s
            + of_a.slow_start_s
            + of_a.others_s
        )
        assert of_a.cost_s == pytest.approx(terms, rel=0.2), "each is rounded"
        assert of_a.cost_s > of_b.cost_s > 0
        assert not of_b.routed_by_load


async def test_a_request_that_would_be_refused_is_refused_here_too() -> None:
    async with cluster(FakeWorker("a")) as router:
        refused = await refusal(router.fleet.ExplainRoute(ExplainRouteRequest()))
        assert (refused.code, refused.field) == (grpc.StatusCode.INVALID_ARGUMENT, "prompt")
        request = ExplainRouteRequest(request=GenerateRequest(model="other", text="x"))
        assert (await refusal(router.fleet.ExplainRoute(request))).code == grpc.StatusCode.NOT_FOUND
        too_many = ExplainRouteRequest(request=GenerateRequest(token_ids=TokenIds(ids=PROMPT), n=99))
        assert (await refusal(router.fleet.ExplainRoute(too_many))).field == "n"


async def test_all_calls_refuse_a_request_for_the_same_reason_first() -> None:
    request = GenerateRequest(model="other", lane=cast("Any", 9), token_ids=TokenIds(ids=PROMPT), n=99)
    async with cluster(FakeWorker("a", grant_key=KEY), grant_key=KEY) as router:
        for _ in range(3):
            grant = router.stub.Grant()
            await grant.write(GrantRequest(request=request))
            refusals = [
                await refusal(router.stub.Generate(request)),
                await refusal(Reads(grant)),
                await refusal(router.fleet.ExplainRoute(ExplainRouteRequest(request=request))),
            ]
            assert len({(refused.code, refused.reason, refused.field) for refused in refusals}) == 1
            if refusals[0].field == "lane":
                request.lane = Lane.LANE_STANDARD
            elif request.model:
                assert refusals[0].code == grpc.StatusCode.NOT_FOUND
                request.model = ""
            else:
                assert refusals[0].field == "n"


async def test_a_session_is_followed_by_its_metadata_and_is_its_tenants_own() -> None:
    async with cluster(*map(FakeWorker, "abcd"), policy=PolicyName.SESSION_AFFINITY) as router:
        request = GenerateRequest(token_ids=TokenIds(ids=PROMPT))

        async def send(*metadata: tuple[str, str]) -> str:
            answer = [response async for response in router.stub.Generate(request, metadata=metadata)]
            return str(answer[0].prompt.worker_id)

        session = ("x-trunkline-session", "chat-7")
        holder = await send(session)
        assert {await send(session) for _ in range(6)} == {holder}
        assert (await explain(router, PROMPT, session="chat-7")).reason == "it had the session's last request"
        told = await explain(router, PROMPT, session="chat-8")
        assert told.reason.startswith("the session is new")
        other = ExplainRouteRequest(request=request)
        told = await router.fleet.ExplainRoute(other, metadata=(session, ("x-trunkline-tenant", "acme")))
        assert told.reason.startswith("the session is new")
        for bad in ((session, session), (("x-trunkline-session", "x" * 257),)):
            refused = await refusal(router.stub.Generate(request, metadata=bad))
            assert (refused.code, refused.field) == (grpc.StatusCode.INVALID_ARGUMENT, "x-trunkline-session")


async def test_workers_are_listed_connected_or_not() -> None:
    a, b = FakeWorker("a"), FakeWorker("b")
    a.cached.update(a.hashes(PROMPT))
    async with cluster(a, b) as router:
        a.send_load(running=1)
        await until(lambda: router.connected(0).load.running == 1)
        await router.answer([*PROMPT, 1])
        of_a, of_b = (await router.fleet.ListWorkers(ListWorkersRequest())).workers
        assert (of_a.worker_id, of_a.model, of_a.epoch) == ("a", "tiny", a.epoch)
        assert (of_a.state, of_a.problem) == (fleet_pb2.WORKER_STATE_READY, "")
        assert (of_a.load.running, of_a.open_choices) == (1, 0)
        assert (of_a.index_accuracy, of_a.index_accuracy_requests, of_a.routed_by_load) == (1.0, 0, False)
        assert of_b.index_accuracy_requests == 0
        b.send_load(draining=True)
        await until(lambda: not router.connected(1).accepts)
        await a.die()
        await until(lambda: router.links[0].worker is None and bool(router.links[0].problem))
        of_a, of_b = (await router.fleet.ListWorkers(ListWorkersRequest())).workers
        assert (of_a.state, of_a.worker_id, of_a.address) == (fleet_pb2.WORKER_STATE_CONNECTING, "a", a.address)
        assert of_a.problem
        assert of_b.state == fleet_pb2.WORKER_STATE_DRAINING


async def test_a_worker_whose_index_is_wrong_is_seen_to_be_routed_by_load() -> None:
    worker = FakeWorker("a")
    worker.cached.update(worker.hashes(PROMPT))
    async with cluster(worker) as router:
        for _ in range(20):
            worker.cached.clear()  # without telling
            with capture_logs() as lines:
                await router.answer([*PROMPT, 1])
        (line,) = (line for line in lines if line["event"].startswith("worker routed by load"))
        assert (line["worker"], line["index_accuracy"]) == ("a", 0.0)
        (status,) = (await router.fleet.ListWorkers(ListWorkersRequest())).workers
        assert (status.index_accuracy, status.index_accuracy_requests, status.routed_by_load) == (0.0, 20, True)
        assert status.problem == "routed by load: only 0% of what its index promised recently was cached"
        (candidate,) = (await explain(router, [*PROMPT, 1])).candidates
        assert candidate.routed_by_load


async def test_nothing_that_a_client_is_told_of_workers_depends_on_whether_another_tenants_prompt_was_new() -> None:
    """The cache grows by the prompt's blocks, or not; the router's index knows, and so does the worker's load."""
    worker = FakeWorker("a")
    async with cluster(worker) as router:

        async def told(cached: int) -> list[str]:
            live = dict(running=2, kv_live_blocks=40, waiting=1, waiting_tokens=5000, running_kv_tokens=640)
            free = 1000 - 40 - cached
            worker.send_load(**live, kv_cached_blocks=cached, kv_free_blocks=free, step_time_us=20_000)
            await until(lambda: router.connected(0).load.kv_cached_blocks == cached)
            route = await explain(router, [1, 2, 3])
            listed = await router.fleet.ListWorkers(ListWorkersRequest())
            assert sum(status.indexed_blocks for status in listed.workers) == 0
            return [str(listed), str(route)]

        before = await told(cached=100)
        request = GenerateRequest(token_ids=TokenIds(ids=PROMPT))
        async for _ in router.stub.Generate(request, metadata=(("x-trunkline-tenant", "innocent"),)):
            pass
        await until(lambda: len(router.connected(0).blocks) > 0)
        assert await told(cached=104) == before
        async for _ in router.stub.Generate(request, metadata=(("x-trunkline-tenant", "innocent"),)):
            pass  # found in the cache this time: the index was right once more
        assert await told(cached=104) == before


@pytest.mark.parametrize("exact", [0, 1, 7, 10, 149, 150, 1449, 99_999, 2**32 - 1, 2**63])
def test_what_is_shown_has_one_digit_and_fits_its_field(exact: int) -> None:
    shown = about(exact)
    assert len(str(shown).rstrip("0")) <= 1 or shown == 2**32 - 1
    assert shown == pytest.approx(min(exact, 2**32), rel=0.5)
    load = LoadSample(
        waiting_tokens=exact,
        uncached_tokens_by_lane=[exact] * 3,
        kv_free_blocks=min(exact, 2**32 - 1),
        kv_cached_blocks=5,
    )
    assert shown_load(load).kv_cached_blocks == 0
    assert shown_load(load).uncached_tokens_by_lane == [shown] * 3


def test_a_load_sample_is_shown_with_every_field_that_clients_may_see() -> None:
    """A field that is added to it has to be thought about here."""
    rounded = {
        *("waiting_tokens", "waiting_uncached_tokens", "uncached_tokens_by_lane", "running_kv_tokens"),
        *("step_time_us", "kv_live_blocks", "kv_free_blocks", "kv_cached_blocks"),
    }
    exact = {
        "running",
        "waiting",
        "draining",
        "waiting_by_lane",
        "retry_delay_ms_by_lane",
        "step_cost",
        "other_experts_s",
    }
    assert {field.name for field in LoadSample.DESCRIPTOR.fields} == rounded | exact

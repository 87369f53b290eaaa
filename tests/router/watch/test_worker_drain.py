"""Draining a worker, over real gRPC and HTTP."""

import asyncio
from typing import Any

import grpc
import pytest
from structlog.testing import capture_logs

from tests.router.access.callers import Router
from tests.router.cluster import PATIENCE_S, cluster, refusal, until
from tests.router.fake_worker import FakeWorker
from tests.router.watch.watch_rig import ACME, OPERATOR, KeyRing, tile, until_view, watch, watched_router
from trunkline.v1 import fleet_pb2
from trunkline.v1.fleet_pb2 import DrainWorkerRequest, UndrainWorkerRequest
from trunkline_bench.servers.ports import free_port

GRANT_KEY = b"the key of grants, of 32 bytes .."


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> KeyRing:
    return KeyRing(tmp_path_factory.mktemp("keys"))


async def over_http(
    router: Router, keys: KeyRing, worker: str, who: str = OPERATOR, action: str = "drain", **options: Any
) -> Any:
    headers = {**keys.headers(who), **options.pop("headers", {})}
    return await router.http.post(f"/fleet/workers/{worker}/{action}", headers=headers, **options)


async def test_a_worker_that_is_drained_gets_no_requests_and_finishes_what_it_has(keys: KeyRing) -> None:
    a, b = FakeWorker("a", drains=True, answer=None, grant_key=GRANT_KEY), FakeWorker("b", grant_key=GRANT_KEY)
    async with watched_router(keys, a, b, grant_key=GRANT_KEY) as router:
        a.cache_prompt(range(64))
        b.send_load(waiting=50, waiting_by_lane=[0, 50, 0], uncached_tokens_by_lane=[0, 90_000, 0])
        await until(lambda: router.inner.connected(1).load.waiting == 50)
        answer = asyncio.create_task(router.generate(keys.headers(ACME), text="before"))
        before = await a.arrived.get()
        call = watch(router, keys.headers(OPERATOR))
        await call.read()
        response = await over_http(router, keys, "a", json={"timeout_s": 7.5})
        assert (response.status_code, response.json()) == (
            200,
            {"worker_id": "a", "address": a.address, "state": "draining"},
        )
        assert [asked.timeout.ToNanoseconds() for asked in a.drained] == [7_500_000_000]
        await until_view(call, lambda view: tile(view, "a").state == fleet_pb2.WORKER_STATE_DRAINING)
        call.cancel()
        await router.generate(keys.headers(ACME), text="after")
        assert len(b.submits) == 1
        assert not answer.done()
        before.tokens(2, finish=True)
        assert await answer, "what runs there is finished there"


async def test_an_undrained_worker_gets_requests_again(keys: KeyRing) -> None:
    a = FakeWorker("a", drains=True, grant_key=GRANT_KEY)
    with capture_logs() as lines:
        async with watched_router(keys, a, grant_key=GRANT_KEY) as router:
            await drained_and_undrained(router, keys, a)
    ends = [line for line in lines if line["event"] == "the end of a drain was asked for"]
    assert [(line["worker"], bool(line["by"])) for line in ends] == [("a", True)] * 2


async def drained_and_undrained(router: Router, keys: KeyRing, a: FakeWorker) -> None:
    assert (await over_http(router, keys, "a")).json()["state"] == "draining"
    with pytest.raises(grpc.aio.AioRpcError, match="no worker is ready"):
        await router.generate(keys.headers(ACME), text="x")
    response = await over_http(router, keys, "a", action="undrain")
    assert (response.status_code, response.json()) == (
        200,
        {"worker_id": "a", "address": a.address, "state": "ready"},
    )
    assert await router.generate(keys.headers(ACME), text="x")
    metadata = tuple(keys.headers(OPERATOR).items())
    await router.fleet.DrainWorker(DrainWorkerRequest(worker="a"), metadata=metadata)
    again = await router.fleet.UndrainWorker(UndrainWorkerRequest(worker="a"), metadata=metadata)
    assert again.state == fleet_pb2.WORKER_STATE_READY


async def test_a_worker_that_stops_or_has_no_undrain_stays_drained_and_the_refusal_says_why(keys: KeyRing) -> None:
    stopping, old = FakeWorker("stopping", drains=True, is_stopping=True), FakeWorker("old")
    async with watched_router(keys, stopping, old) as router:
        await over_http(router, keys, "stopping")
        for worker, why in (("stopping", "this fake worker is stopping"), ("old", "is of an earlier version")):
            response = await over_http(router, keys, worker, action="undrain")
            assert (response.status_code, response.json()["error"]["code"]) == (503, "no_worker")
            assert why in response.json()["error"]["message"]
        assert (await over_http(router, keys, "none", action="undrain")).status_code == 404
        assert (await over_http(router, keys, "old", action="undrain", json={"timeout_s": 1})).status_code == 400


async def test_an_operator_alone_drains(keys: KeyRing) -> None:
    a = FakeWorker("a", drains=True)
    async with watched_router(keys, a) as router:
        for who, status in ((ACME, 403), ("", 401)):
            for action in ("drain", "undrain"):
                assert (await over_http(router, keys, "a", who, action)).status_code == status
        metadata = tuple(keys.headers(ACME).items())
        refused = await refusal(router.fleet.DrainWorker(DrainWorkerRequest(worker="a"), metadata=metadata))
        assert refused.reason == "FORBIDDEN"
        assert not a.drained


async def test_wrong_drains_are_refused_by_name(keys: KeyRing) -> None:
    a = FakeWorker("a")
    async with watched_router(keys, a, FakeWorker("b")) as router:
        for worker in ("c", "a%2Fb", "127.0.0.1:1"):
            response = await over_http(router, keys, worker)
            assert (response.status_code, response.json()["error"]["code"]) == (404, "worker_not_found")
        for body in ({"timeout_s": -1}, {"timeout_s": "7"}, {"timeout": 7}, {"timeout_s": 1e9}):
            response = await over_http(router, keys, "a", json=body)
            assert (response.status_code, "timeout" in response.json()["error"]["message"]) == (400, True), body
        response = await over_http(router, keys, a.address.replace(":", "%3A"))
        assert (response.status_code, response.json()["error"]["code"]) == (503, "no_worker")
        assert "UNIMPLEMENTED" in response.json()["error"]["message"]


async def test_a_worker_that_is_named_like_anothers_address_is_not_drained_in_its_place() -> None:
    meant = FakeWorker("a", drains=True)
    meant.port = free_port()
    impostor = FakeWorker(meant.address, drains=True)
    async with cluster(impostor, meant) as router:
        assert router.links[0].address == impostor.address
        drained = await router.fleet.DrainWorker(DrainWorkerRequest(worker=meant.address), timeout=PATIENCE_S)
        assert drained.worker_id == "a"
        assert (len(meant.drained), len(impostor.drained)) == (1, 0)


async def test_a_worker_that_is_not_connected_is_not_drained() -> None:
    a = FakeWorker("a", drains=True)
    async with cluster(a) as router:
        await a.die()
        await until(lambda: router.links[0].worker is None)
        refused = await refusal(router.fleet.DrainWorker(DrainWorkerRequest(worker="a"), timeout=PATIENCE_S))
        assert (refused.code, refused.reason) == (grpc.StatusCode.UNAVAILABLE, "NO_WORKER")


@pytest.mark.parametrize(
    "headers",
    [
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
        {"origin": "https://evil.example"},
        {"origin": "null"},
    ],
)
async def test_a_page_of_another_origin_neither_drains_nor_watches(keys: KeyRing, headers: dict[str, str]) -> None:
    a = FakeWorker("a", drains=True)
    async with watched_router(keys, a) as router:
        for action in ("drain", "undrain"):
            assert (await over_http(router, keys, "a", action=action, headers=headers)).status_code == 403
        assert not a.drained
        for path in ("/fleet/events", "/fleet/requests", "/fleet/requests/x"):
            response = await router.http.get(path, headers={**keys.headers(OPERATOR), **headers})
            assert response.status_code == 403, path


async def test_the_routers_own_page_drains(keys: KeyRing) -> None:
    for headers in ({"sec-fetch-site": "same-origin"}, None):
        a = FakeWorker("a", drains=True)
        async with watched_router(keys, a) as router:
            own = headers or {"origin": str(router.http.base_url).rstrip("/")}
            assert (await over_http(router, keys, "a", headers=own)).status_code == 200

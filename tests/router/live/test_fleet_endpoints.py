"""FleetService over real HTTP, as the live page calls it."""

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pytest

from tests.router.cluster import PATIENCE_S, cluster, until
from tests.router.fake_worker import FakeWorker
from tests.router.http.http_rig import connected_to
from tests.router.watch.watch_rig import ACME, OPERATOR, OTHER, SCRAPER, KeyRing, is_reported, stats, watched_router
from trunkline_router.access.access import Access
from trunkline_router.edge.http_call import Edge


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> KeyRing:
    return KeyRing(tmp_path_factory.mktemp("keys"))


async def events(response: httpx2.Response) -> AsyncIterator[tuple[str, Any]]:
    name = ""
    async for line in response.aiter_lines():
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            yield name, json.loads(line.removeprefix("data: "))


async def test_the_page_gets_a_snapshot_and_then_updates(keys: KeyRing) -> None:
    worker = FakeWorker("a", stats=stats(10.0))
    async with watched_router(keys, worker) as router:
        worker.send_load(running=3, kv_live_blocks=1, kv_cached_blocks=2, kv_free_blocks=3)
        await until(lambda: router.inner.connected(0).load.running == 3)
        await router.generate(keys.headers(ACME), text="hello", request_id="mine")
        async with router.http.stream("GET", "/fleet/events", headers=keys.headers(OPERATOR)) as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            assert response.headers["cache-control"] == "no-cache"
            feed = events(response)
            name, first = await anext(feed)
            assert name == "snapshot"
            assert first["you"] == {
                "tenant": "ops", "is_operator": True, "sees_cache": True, "sees_requests": True, "can_drain": True,
            }  # fmt: skip
            (tile,) = first["workers"]
            assert (tile["worker_id"], tile["state"], tile["reason"], tile["running"]) == ("a", "ready", "", 3)
            assert tile["kv"] == {"live_blocks": 1, "cached_blocks": 2, "free_blocks": 3, "block_tokens": 4}
            assert (tile["output_tokens_per_s"], tile["batch"]) == (None, None), "not known yet: null, not 0"
            assert first["requests"][0]["request_id"] == "mine"
            await until(lambda: is_reported(router, "a"))
            worker.stats = stats(11.0, decode=50)
            known = {point["at_unix_ms"] for point in first["history"]["points"]}
            async for name, view in feed:
                assert name == "update"
                new = [point["at_unix_ms"] for point in view["history"]["points"]]
                assert not known & set(new), "each point once"
                known |= set(new)
                if view["workers"][0]["output_tokens_per_s"]:
                    break
            (tile,) = view["workers"]
            assert tile["lanes"][0]["lane"] == "standard"
            assert (tile["ttft_p50_s"], tile["batch"]["decode_tokens_per_s"]) == (0.25, 50.0)
        await until(lambda: not router.inner.watch.watchers.num_open)


async def test_two_watchers_with_different_rights_see_different_states_of_one_sample(keys: KeyRing) -> None:
    async with watched_router(keys, FakeWorker("a")) as router:
        await router.generate(keys.headers(ACME), text="hello", request_id="of-acme")
        seen = {}
        for who in (OPERATOR, ACME, OTHER):
            async with router.http.stream("GET", "/fleet/events", headers=keys.headers(who)) as response:
                _, seen[who] = await anext(events(response))
        assert [len(seen[who]["requests"]) for who in (OPERATOR, ACME, OTHER)] == [1, 1, 0]
        assert seen[OTHER]["workers"][0]["address"] == ""
        assert seen[OTHER]["workers"][0]["running"] is None
        assert not seen[OTHER]["history"]["points"]


async def test_wrong_identities_see_nothing(keys: KeyRing) -> None:
    async with watched_router(keys, FakeWorker("a")) as router:
        await router.generate(keys.headers(ACME), text="hello", request_id="of-acme")
        for path in ("/fleet/events", "/fleet/requests", "/fleet/requests/of-acme"):
            assert (await router.http.get(path)).status_code == 401
            assert (await router.http.get(path, headers={"authorization": "Bearer no"})).status_code == 401
            assert (await router.http.get(path, headers=keys.headers(SCRAPER))).status_code == 403
        for name in ("of-acme", "of-none", "a%2Fb"):
            response = await router.http.get(f"/fleet/requests/{name}", headers=keys.headers(OTHER))
            assert (response.status_code, response.json()["error"]["code"]) == (404, "request_not_found")


async def test_wrong_queries_are_refused_by_name(keys: KeyRing) -> None:
    async with watched_router(keys, FakeWorker("a")) as router:
        for query in ("limit=501", "limit=-1", "limit=x", "only=fast", "mood=good", "limit=1&limit=2"):
            response = await router.http.get(f"/fleet/requests?{query}", headers=keys.headers(ACME))
            assert (response.status_code, response.json()["error"]["param"]) == (400, query.split("=")[0]), query


async def test_an_id_of_any_visible_characters_is_found(keys: KeyRing) -> None:
    async with watched_router(keys, FakeWorker("a")) as router:
        name = "a/b?c=d&%41#"
        body = {"model": "tiny", "prompt": "hello", "max_tokens": 2}
        done = await router.http.post(
            "/v1/completions", json=body, headers={**keys.headers(ACME), "x-request-id": name}
        )
        assert done.status_code == 200
        path = "/fleet/requests/a%2Fb%3Fc%3Dd%26%2541%23"
        told = (await router.http.get(path, headers=keys.headers(ACME))).json()
        assert (told["request_id"], told["endpoint"], told["protocol"]) == (name, "/v1/completions", "http")


async def test_a_browser_that_reads_nothing_holds_up_nobody(keys: KeyRing) -> None:
    async with watched_router(keys, FakeWorker("a")) as router, connected_to(router.inner.http_port) as client:
        credential = keys.headers(OPERATOR)["authorization"]
        client.send(f"GET /fleet/events HTTP/1.1\r\nHost: x\r\nAuthorization: {credential}\r\n\r\n".encode())
        await until(lambda: router.inner.watch.watchers.num_open == 1)
        async with router.http.stream("GET", "/fleet/events", headers=keys.headers(ACME)) as response:
            feed = events(response)
            times = [(await anext(feed))[1]["at_unix_ms"] for _ in range(5)]
        assert times == sorted(set(times))


@pytest.mark.parametrize("access", [Access(), Access(allows_anonymous=True)])
async def test_without_credentials_a_drain_and_every_look_need_a_local_host(access: Access) -> None:
    """A page's own name may lead here (DNS rebinding), and then the page is of the same origin."""
    a = FakeWorker("a", drains=True)
    async with cluster(a, edge=Edge, access=access) as router:
        url = f"http://127.0.0.1:{router.http_port}"
        async with httpx2.AsyncClient(base_url=url, timeout=PATIENCE_S, trust_env=False) as http:
            rebound = {"host": "evil.example:8000", "origin": "http://evil.example:8000"}
            for path in ("/fleet/events", "/fleet/requests", "/fleet/requests/x"):
                refused = await http.get(path, headers=rebound)
                assert (refused.status_code, "localhost" in refused.text) == (403, True), path
            assert (await http.post("/fleet/workers/a/drain", headers=rebound)).status_code == 403
            assert not a.drained
            assert (await http.get("/fleet/requests")).status_code == 200
            assert (await http.post("/fleet/workers/a/drain")).status_code == 200

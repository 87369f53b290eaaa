"""Tenants and lanes from the client's call through a router's terms to the worker's books."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.processes import Cluster, running_cluster
from tests.worker.engine_rig import DEMO_MODEL
from trunkline import Client
from trunkline.errors import InvalidRequest
from trunkline.v1.generation_pb2 import Lane
from trunkline.v1.inference_pb2 import ChatMessage, ChatMessages, DetokenizeRequest, TokenizeRequest
from trunkline.v1.worker_pb2 import GetStatsRequest

pytestmark = pytest.mark.slow

TERMS = {
    "acme": {"weight": 3, "lane": "standard"},
    "left": {"cache_group": "pair"},
    "right": {"cache_group": "pair"},
    "open": {"cache_group": ""},
    "*": {"lane": "interactive"},
}


@pytest.fixture(scope="module")
def tenants_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    terms: Path = tmp_path_factory.mktemp("router") / "tenants.json"
    terms.write_text(json.dumps(TERMS))
    environment = {"TRUNKLINE_TENANTS": str(terms)}
    with running_cluster(DEMO_MODEL, "--kv-blocks=128", workers=1, environment=environment) as running:
        yield running


async def lane_of(cluster: Cluster, tenant: str, lane: str | None) -> str:
    async with Client(cluster.address, tenant=tenant) as client:
        done = await client.complete("Once upon a time", max_tokens=2, lane=lane)
    return Lane.Name(done.prompt.lane)


async def test_a_request_runs_in_the_lane_it_asks_for_up_to_its_tenants_cap(tenants_cluster: Cluster) -> None:
    assert await lane_of(tenants_cluster, "", None) == "LANE_STANDARD"
    assert await lane_of(tenants_cluster, "", "interactive") == "LANE_INTERACTIVE"
    assert await lane_of(tenants_cluster, "acme", "interactive") == "LANE_STANDARD"
    assert await lane_of(tenants_cluster, "acme", "batch") == "LANE_BATCH"
    assert await lane_of(tenants_cluster, "left", "interactive") == "LANE_STANDARD", "it was not granted"


async def test_the_worker_serves_a_tenant_with_the_weight_that_the_router_gives_it(tenants_cluster: Cluster) -> None:
    assert await lane_of(tenants_cluster, "acme", "batch") == "LANE_BATCH"
    stats = tenants_cluster.workers[0].stub.GetStats(GetStatsRequest(), timeout=60)
    weights = {(entry.tenant, entry.lane): entry.weight for entry in stats.tenants}
    assert weights["acme", Lane.LANE_BATCH] == 3.0


async def test_the_routers_line_tells_tenant_and_lane(tenants_cluster: Cluster) -> None:
    async with Client(tenants_cluster.address, tenant="acme") as client:
        await client.complete("Once", max_tokens=1, lane="interactive", request_id="told-in-the-log")
    line = json.loads(
        tenants_cluster.router.wait_for('"request ended".*told-in-the-log|told-in-the-log.*"request ended"')
    )
    assert (line["tenant"], line["lane"]) == ("acme", "standard")


async def test_a_request_whose_id_cannot_be_used_leaves_a_line(tenants_cluster: Cluster) -> None:
    async with Client(tenants_cluster.address, tenant="careless") as client:
        with pytest.raises(InvalidRequest) as caught:
            await client.complete("Once", request_id="two words")
    assert caught.value.field == "request_id"
    tenants_cluster.router.wait_for('"outcome":"INVALID_REQUEST"')


async def test_clients_can_wait_until_the_router_is_ready(tenants_cluster: Cluster) -> None:
    async with Client(tenants_cluster.address) as client:
        await client.ready(30)


def test_a_message_can_be_continued_where_the_chat_template_would_end_it(tenants_cluster: Cluster) -> None:
    turns = [
        ChatMessage(role="user", content="Tell me a story about a fox."),
        ChatMessage(role="assistant", content="Once upon a time"),
    ]
    opened, closed = (
        tenants_cluster.stub.Tokenize(
            TokenizeRequest(chat=ChatMessages(messages=turns, continue_final_message=go_on)), timeout=60
        ).token_ids
        for go_on in (True, False)
    )
    text = tenants_cluster.stub.Detokenize(
        DetokenizeRequest(token_ids=opened, keep_special_tokens=True), timeout=60
    ).text
    assert text.endswith("Once upon a time")
    assert list(opened) == closed[: len(opened)]
    assert len(opened) < len(closed)


async def test_a_tenants_cached_prompts_are_its_own_or_its_groups(tenants_cluster: Cluster) -> None:
    prompt = list(range(5, 55))

    async def cached(tenant: str) -> int:
        async with Client(tenants_cluster.address, tenant=tenant) as client:
            return (await client.complete(prompt, max_tokens=1)).prompt.cached_tokens

    firsts = [await cached(tenant) for tenant in ("acme", "somebody", "left", "")]
    assert firsts == [0, 0, 0, 0], "nobody learns of another tenant's prompt"
    again = [await cached(tenant) for tenant in ("acme", "somebody", "right", "open")]
    assert again == [48, 48, 48, 48]

"""GET /metrics of a real router before fake workers."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import httpx2
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from deploy.lint.metrics_reference import HIGHEST, LOWEST
from tests.metrics_page import documented, told
from tests.router.access.callers import Keys, bearer, router_of
from tests.router.cluster import PATIENCE_S, Cluster, cluster, refusal, until
from tests.router.fake_worker import FakeWorker
from tests.router.metrics.records import answered, value
from tests.router.scraping.scrape_rig import OPENMETRICS, TEXT, check_with_promtool, samples, scrape
from trunkline.v1.generation_pb2 import SamplingParams
from trunkline.v1.inference_pb2 import GenerateRequest
from trunkline_router.access.access import Tenant, Tenants
from trunkline_router.access.identity.needed_roles import Open
from trunkline_router.edge.http_call import Edge
from trunkline_router.edge.status_endpoints import SCRAPES
from trunkline_router.observe.metrics.worker_gauges import KEPT_S, WorkerGauges
from trunkline_router.quotas.quota import Quotas

TERMS = Tenants({"acme": Tenant(quotas=Quotas(requests_per_minute=2, tokens_in_flight=10_000))})
SECRET = "a prompt that nobody else may read"


@pytest.fixture
async def router() -> AsyncIterator[Cluster]:
    async with cluster(FakeWorker("w0"), FakeWorker("w1"), edge=Edge, tenants=TERMS) as made:
        yield made


async def complete(router: Cluster, tenant: str = "acme", **fields: Any) -> int:
    """The status of a completion."""
    async with httpx2.AsyncClient(timeout=PATIENCE_S, trust_env=False) as client:
        url, headers = f"http://127.0.0.1:{router.http_port}/v1/completions", {"x-trunkline-tenant": tenant}
        body = {"model": "tiny", "prompt": SECRET, **fields}
        return (await client.post(url, json=body, headers=headers)).status_code


async def test_a_scrape_tells_what_became_of_requests_and_the_state_of_the_router(router: Cluster) -> None:
    assert [await complete(router) for _ in range(3)] == [200, 200, 429]
    assert await complete(router, unheard_of=1) == 400
    found = await samples(router.http_port)
    expected = {
        "trunkline_router_requests_total": 3,
        "trunkline_router_first_token_seconds_count": 2,
        "trunkline_router_tenant_tokens_total": 2 * (found["vllm:request_max_num_generation_tokens_sum"] / 2)
        + found["trunkline_router_route_prompt_tokens_total"],
        "trunkline_router_route_decisions_total": 2,
        "trunkline_router_worker_attempts_total": 2,
        "trunkline_router_worker_connections_total": 2,
        "trunkline_router_worker_state": 2,
        "trunkline_router_pool_workers": 2,
        "trunkline_router_calls_refused_total": 1,
        "trunkline_router_quota_refusals_total": 1,
        "trunkline_router_quota_used": 2,
        "trunkline_router_quota_limit": 10_002,
        "trunkline_router_running_requests": 0,
        "trunkline_router_ready": 1,
        "trunkline_router_processes": 1,
        "vllm:request_params_n_count": 2,
        "gen_ai_server_time_to_first_token_seconds_count": 2,
    }
    assert {name: found[name] for name in expected} == expected


async def test_the_answer_is_what_prometheus_wants(router: Cluster) -> None:
    await complete(router)
    response = await scrape(router.http_port)
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert SECRET not in response.text
    check_with_promtool(response.text)


async def test_no_series_is_told_twice_whatever_is_refused(router: Cluster) -> None:
    """Prometheus drops the second sample of a series, and says so at each scrape."""
    address = f"http://127.0.0.1:{router.http_port}"
    async with httpx2.AsyncClient(base_url=address, timeout=PATIENCE_S, trust_env=False) as client:
        for path in ("/page/nothing.js", "/fleet/requests/none", "/v1/responses/resp_none", "/v1/models/none", "/no"):
            assert (await client.get(path)).status_code == 404
        await client.post("/v1/completions", content=b"{")
    await refusal(router.stub.Generate(GenerateRequest(model="none")))
    for accept in (TEXT, OPENMETRICS):
        text = (await scrape(router.http_port, accept)).text
        series = Counter(line.split("} ")[0] for line in text.splitlines() if not line.startswith("#"))
        assert {each for each, count in series.items() if count > 1} == set()
        assert 'calls_refused_total{protocol="http",reason="RESPONSE_NOT_FOUND"} ' in text


async def test_the_page_has_exactly_the_metrics_that_there_are(router: Cluster) -> None:
    await complete(router)
    assert told((await scrape(router.http_port)).text) == documented("router")


async def test_openmetrics_is_answered_to_those_who_know_it(router: Cluster) -> None:
    await complete(router)
    response = await scrape(router.http_port, OPENMETRICS)
    assert response.headers["content-type"].startswith("application/openmetrics-text")
    names = Counter(family.name for family in parse_openmetrics(response.text))  # type: ignore[no-untyped-call]
    assert set(names.values()) == {1}, "a family is not repeated"
    assert "trace_id" not in response.text, "without an exporter there are no traces to give as examples"


async def test_each_rule_for_several_processes_is_one_of_a_gauge(router: Cluster) -> None:
    await complete(router)
    text = (await scrape(router.http_port)).text
    gauges = {family.name for family in text_string_to_metric_families(text) if family.type == "gauge"}
    only_elsewhere = {
        *("trunkline_certificate_expires_in_seconds", "trunkline_certificate_lifetime_seconds"),
        *("trunkline_router_redis_reachable", "trunkline_router_neighbours"),
        "trunkline_router_worker_clock_skew_seconds",
    }
    assert (HIGHEST | LOWEST) - gauges <= only_elsewhere, "a rule for a gauge that there is not"
    assert not HIGHEST & LOWEST


async def test_a_scraper_needs_its_role_unless_metrics_are_opened(tmp_path: Path) -> None:
    keys = Keys(tmp_path / "keys.json")
    key, other = keys.add(roles=["scraper"]), keys.add(roles=["user", "operator"])
    async with router_of(keys, FakeWorker("w")) as router:
        port = router.inner.http_port
        for headers, status in (({}, 401), (bearer(other), 403), (bearer("wrong"), 401), (bearer(key), 200)):
            assert (await scrape(port, headers=headers)).status_code == status
        told = (await scrape(port, headers=bearer(key))).text
    assert 'trunkline_router_calls_refused_total{protocol="http",reason="UNAUTHENTICATED"} 2.0' in told
    assert 'trunkline_router_calls_refused_total{protocol="http",reason="FORBIDDEN"} 1.0' in told
    async with router_of(keys, FakeWorker("w"), opened=frozenset({Open.METRICS})) as router:
        assert (await scrape(router.inner.http_port)).status_code == 200


async def until_status(port: int, status: int) -> None:
    """Waits until a scraper is answered with this status."""
    async with asyncio.timeout(PATIENCE_S):
        while (await scrape(port)).status_code != status:  # noqa: ASYNC110  # places have no event
            await asyncio.sleep(0.01)


async def test_scrapers_that_do_not_read_take_the_places_of_scrapers_alone(router: Cluster) -> None:
    for n in range(1000):  # so that an answer does not fit into the sockets' buffers
        router.counted.request_ended(answered(tenant=f"tenant-{n % 90}", model=f"model-{n % 30}"))
    port = router.http_port
    assert len((await scrape(port)).content) > 250_000
    connections = [await asyncio.open_connection("127.0.0.1", port, limit=1024) for _ in range(SCRAPES.of_host)]
    for _, writer in connections:
        writer.write(b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
    await until_status(port, 429)
    assert await complete(router) == 200, "requests go on"
    elsewhere = httpx2.AsyncHTTPTransport(local_address="127.0.0.2")
    async with httpx2.AsyncClient(timeout=PATIENCE_S, trust_env=False, transport=elsewhere) as client:
        assert (await client.get(f"http://127.0.0.1:{port}/metrics")).status_code == 200, "other hosts scrape"
    for _, writer in connections:
        writer.transport.abort()
    await until_status(port, 200)


async def test_workers_states_and_losses_are_told() -> None:
    worker, other = FakeWorker("w0"), FakeWorker("w1")
    async with cluster(worker, other, edge=Edge) as router:
        await worker.die()
        await router.until_workers(False, True)
        text = (await scrape(router.http_port)).text
    for line in (
        'trunkline_router_worker_state{state="connecting",worker="w0"} 1.0',
        'trunkline_router_worker_state{state="ready",worker="w0"} 0.0',
        'trunkline_router_worker_state{state="ready",worker="w1"} 1.0',
        'trunkline_router_worker_losses_total{worker="w0"} 1.0',
        'trunkline_router_worker_breaker_openings_total{worker="w0"} 1.0',
    ):
        assert line in text


async def test_a_model_whose_last_worker_is_gone_has_no_workers() -> None:
    worker = FakeWorker("w0")
    async with cluster(worker, edge=Edge) as router:
        assert 'trunkline_router_pool_workers{model_name="tiny"} 1.0' in (await scrape(router.http_port)).text
        await worker.die()
        await router.until_workers(False)
        await scrapes_tell(router.http_port, 'trunkline_router_pool_workers{model_name="tiny"} 0.0')
        await scrapes_tell(router.http_port, "trunkline_router_ready 0.0")


async def scrapes_tell(port: int, line: str) -> None:
    """Waits until a scrape has this line: an answer is given again for a moment."""
    async with asyncio.timeout(PATIENCE_S):
        while line not in (await scrape(port)).text:  # noqa: ASYNC110  # the age of an answer has no event
            await asyncio.sleep(0.01)


async def test_a_model_is_forgotten_a_day_after_its_last_address() -> None:
    now_s = 0.0
    async with cluster(FakeWorker("w0")) as router:
        pools = router.inference.pools
        gauges = WorkerGauges(pools, lambda: now_s)
        links = list(pools.links)
        try:
            assert numbers_of_workers(gauges) == {"tiny": 1.0}
            pools.links.clear()
            pools.notify()
            now_s = KEPT_S - 1
            assert numbers_of_workers(gauges) == {"tiny": 0.0}
            now_s = KEPT_S
            assert numbers_of_workers(gauges) == {}
        finally:
            pools.links.extend(links)
            pools.notify()


def numbers_of_workers(gauges: WorkerGauges) -> dict[str, float]:
    """The workers of each model."""
    (family,) = (one for one in gauges.families() if one.name == "trunkline_router_pool_workers")
    return {sample.labels["model_name"]: sample.value for sample in family.samples}


async def now(router: Cluster, name: str) -> float:
    """The sum of the samples of this name, without the time for which an answer is given again."""
    families = [*await router.collect()]
    return value(lambda: families, name)


async def test_requests_that_wait_for_a_worker_and_continue_are_told() -> None:
    worker = FakeWorker("w0", answer=None)
    async with cluster(worker) as router:
        call = router.generate("x", sampling=SamplingParams(max_tokens=3))
        (await worker.arrived.get()).tokens(1)
        await call.read()
        await worker.die()
        await until(lambda: router.inference.pools.num_waiting == 1)
        assert await now(router, "trunkline_router_waiting_requests") == 1
        await worker.start()
        (await worker.arrived.get()).tokens(2, finish=True)
        while await call.read() is not grpc.aio.EOF:
            pass
        assert await now(router, "trunkline_router_waiting_requests") == 0
        assert await now(router, "trunkline_router_failovers_total") == 1
        assert await now(router, "trunkline_router_failover_silence_seconds_count") == 1

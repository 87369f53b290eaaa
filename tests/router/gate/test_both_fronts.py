"""gRPC and HTTP pass one gate: a client that uses both has one client's share."""

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import grpc
import httpx2

from tests.router.cluster import PATIENCE_S, cluster, refusal, until
from tests.router.fake_worker import FakeWorker
from tests.router.virtual_time import in_virtual_time
from trunkline.names import TENANT_KEY
from trunkline.v1.inference_pb2 import GenerateRequest
from trunkline_router.access.gate.places import Bounds, Places, Sender, http_sender_of
from trunkline_router.access.gate.reading import READ_BOUNDS, Reading
from trunkline_router.edge.http_call import Edge

OF_TENANT = 4
SLOW = 500  # connections of one tenant, whose bodies never end
BODY = {"model": "tiny", "prompt": "hi", "stream": True}


def over_http(number: int, tenant: str = "greedy", host: str = "ipv4:10.0.0.1") -> Sender:
    return http_sender_of(f"{host}:{number}", tenant)


async def held(reading: Reading, sender: Sender) -> None:
    place = await reading.begin(sender, lambda _: None)
    try:
        await asyncio.Event().wait()
    finally:
        reading.end(place)


async def waited_s(reading: Reading, sender: Sender) -> float:
    """How long a request waits for its place."""
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    place = await reading.begin(sender, lambda _: None)
    reading.end(place)
    return loop.time() - began_s


async def beside(slow: list[Sender], *askers: Sender) -> list[float]:
    """How long each of the askers waits beside slow senders."""
    reading = Reading()
    tasks = [asyncio.create_task(held(reading, sender)) for sender in slow]
    await asyncio.sleep(0.01)
    try:
        return [await waited_s(reading, asker) for asker in askers]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def test_a_thousand_slow_bodies_over_http_have_the_turns_of_one_connection() -> None:
    slow = [over_http(number) for number in range(SLOW)]
    modest = over_http(SLOW, tenant="modest")
    over_grpc = Sender("ipv4:10.0.0.1", "ipv4:10.0.0.1:9", "modest")
    assert max(in_virtual_time(beside(slow, modest, over_grpc, modest))) < 0.5


def test_a_host_that_uses_both_fronts_leaves_places_to_others() -> None:
    over_grpc = [Sender("ipv4:10.0.0.1", f"ipv4:10.0.0.1:{number}", "greedy") for number in range(SLOW)]
    slow = [one for pair in zip(over_grpc, map(over_http, range(SLOW)), strict=True) for one in pair]
    other = over_http(0, tenant="modest", host="ipv4:10.0.0.2")
    assert READ_BOUNDS.of_host < READ_BOUNDS.in_all
    assert in_virtual_time(beside(slow, other)) == [0.0]


async def test_open_requests_of_a_tenant_are_counted_over_both_fronts_together() -> None:
    worker = FakeWorker("w0", answer=None)
    async with cluster(worker, edge=Edge) as router, AsyncExitStack() as stack:
        router.gate.requests = Places(Bounds(100, 100, 100, OF_TENANT), "open requests")
        http = await stack.enter_async_context(
            httpx2.AsyncClient(base_url=f"http://127.0.0.1:{router.http_port}", timeout=PATIENCE_S, trust_env=False)
        )

        def asked(tenant: str) -> Any:
            return http.post("/v1/completions", json=BODY, headers={TENANT_KEY: tenant})

        def generate(tenant: str) -> Any:
            return router.stub.Generate(
                GenerateRequest(text="hi"), metadata=((TENANT_KEY, tenant),), timeout=PATIENCE_S
            )

        calls = [generate("greedy") for _ in range(OF_TENANT // 2)]
        tasks = [asyncio.create_task(asked("greedy")) for _ in range(OF_TENANT // 2)]
        choices = [await worker.arrived.get() for _ in range(OF_TENANT)]
        assert router.gate.requests.num_held == OF_TENANT
        assert (await asked("greedy")).status_code == 429
        assert (await refusal(generate("greedy"))).code == grpc.StatusCode.RESOURCE_EXHAUSTED
        tasks.append(asyncio.create_task(asked("modest")))
        choices.append(await worker.arrived.get())
        for choice in choices:
            choice.tokens(1, finish=True)
        assert [answer.status_code for answer in await asyncio.gather(*tasks)] == [200] * len(tasks)
        for call in calls:
            assert [response async for response in call]
        await until(lambda: not router.gate.requests.num_held)

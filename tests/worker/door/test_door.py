"""Whose calls a worker's door lets in, and whose uploads give way, whoever else has many."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import ServiceDescriptor
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub
from grpc_reflection.v1alpha import reflection_pb2

from tests.worker.front.served_front import MODEL, ServedFront, raw_call, served_front
from trunkline.grant import GrantKeys
from trunkline.proof import proof_metadata
from trunkline.status import OVERLOADED, RequestRefused
from trunkline.v1 import worker_pb2
from trunkline_runtime.channel import open_channel
from trunkline_worker.front.door import (
    BY_ROUTERS,
    GATED,
    HEALTH_CHECK,
    OF_ROUTERS,
    OF_STRANGERS,
    CallAuthorizer,
    Door,
    Uploads,
)
from trunkline_worker.front.service import SERVICE

KEY = b"k" * 32
NOW_UNIX_MS = 1_700_000_000_000


class Caller:
    """The context of a call, of which the message comes when it is `sent`."""

    def __init__(self, peer: str, metadata: tuple[tuple[str, str], ...] = ()) -> None:
        self._peer, self._metadata = peer, metadata
        self.sent = asyncio.Event()

    def peer(self) -> str:
        return self._peer

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return self._metadata

    async def read(self) -> bytes:
        await self.sent.wait()
        return b""


def door_of(key: bytes) -> Door:
    return Door(CallAuthorizer(GrantKeys(key), MODEL.worker_id, MODEL.epoch, lambda: NOW_UNIX_MS), MODEL)


def proof(method: str) -> tuple[tuple[str, str], ...]:
    return proof_metadata(KEY, method, worker_id=MODEL.worker_id, epoch=MODEL.epoch, now_unix_ms=NOW_UNIX_MS)


def fill(door: Door, method: str, host: str) -> int:
    """Calls until the host gets no more, each on a connection of its own. Returns how many it has."""
    metadata = proof(method.rpartition("/")[2])
    for count in range(10_000):
        try:
            door.enter(method, Caller(f"ipv4:{host}:{count}", metadata))  # type: ignore[arg-type]
        except RequestRefused:
            return count
    raise AssertionError(f"{method} is not bounded")


def methods_of(*services: ServiceDescriptor) -> list[str]:
    return [f"/{service.full_name}/{method.name}" for service in services for method in service.methods]


METHODS = methods_of(
    worker_pb2.DESCRIPTOR.services_by_name["WorkerService"],
    health_pb2.DESCRIPTOR.services_by_name["Health"],
    reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"],
)


@pytest.mark.parametrize("key", [KEY, b""], ids=["with a key", "without"])
def test_calls_of_every_kind_are_bounded_for_a_host_and_leave_places_to_other_hosts_and_other_kinds(key: bytes) -> None:
    door = door_of(key)
    for method in METHODS:
        if method != HEALTH_CHECK:
            assert fill(door, method, "10.0.0.1")
    for method in METHODS:
        door.enter(method, Caller("ipv4:10.0.0.2:1", proof(method.rpartition("/")[2]))).leave()  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", BY_ROUTERS)
def test_a_thousand_router_processes_behind_one_address_are_let_in_where_they_have_the_key(kind: str) -> None:
    assert fill(door_of(KEY), f"/{SERVICE}/{kind}", "10.0.0.1") == OF_ROUTERS.per_host >= 1000
    assert fill(door_of(b""), f"/{SERVICE}/{kind}", "10.0.0.1") == OF_STRANGERS.per_host


def test_a_router_beyond_the_bound_is_told_to_come_back() -> None:
    door, method = door_of(KEY), f"/{SERVICE}/Session"
    fill(door, method, "10.0.0.1")
    with pytest.raises(RequestRefused, match="of one host") as caught:
        door.enter(method, Caller("ipv4:10.0.0.1:99999", proof("Session")))  # type: ignore[arg-type]
    assert (caught.value.reason, caught.value.retry_delay_ms) == (OVERLOADED, 1000)


def test_strangers_take_no_places_of_routers() -> None:
    door = door_of(KEY)
    for method in GATED:
        for port in range(10):
            with pytest.raises(RequestRefused):
                door.enter(f"/{SERVICE}/{method}", Caller(f"ipv4:10.0.0.1:{port}"))  # type: ignore[arg-type]
        assert not door._kinds[method].num_taken


@asynccontextmanager
async def full(worker: ServedFront) -> AsyncIterator[None]:
    """Several hosts have all the calls and all the uploads that the worker takes."""
    for method in METHODS:
        hosts = 1
        while method != HEALTH_CHECK and fill(worker.door, method, f"10.0.0.{hosts}"):
            hosts += 1
    slow = [Caller(f"ipv4:10.0.0.{index % 4}:{index}") for index in range(worker.door._uploads._most)]
    reading = [asyncio.create_task(worker.door._uploads.read(call)) for call in slow]  # type: ignore[arg-type]
    await asyncio.sleep(0)
    yield
    for task in reading:
        task.cancel()
    await asyncio.gather(*reading, return_exceptions=True)


async def test_a_full_worker_answers_every_health_check_and_refuses_nothing_else_in_silence() -> None:
    async with served_front() as worker, open_channel(worker.address) as channel, full(worker):
        check: Any = HealthStub(channel).Check
        for _ in range(50):
            assert (await check(HealthCheckRequest(service="liveness"))).status == HealthCheckResponse.SERVING
        with pytest.raises(grpc.aio.AioRpcError, match="which is its limit"):
            await raw_call(channel, "GetModel", b"").read()


async def test_health_checks_that_send_no_request_give_way_to_those_that_do() -> None:
    async with served_front() as worker, open_channel(worker.address) as slow, open_channel(worker.address) as channel:
        open_check: Any = slow.stream_unary(HEALTH_CHECK)
        calls = [open_check() for _ in range(300)]
        uploads = worker.door._uploads
        deadline = time.monotonic() + 60
        while len(uploads._reading) < uploads._most:
            assert time.monotonic() < deadline
            await asyncio.sleep(0)
        check: Any = HealthStub(channel).Check
        for _ in range(50):
            assert (await check(HealthCheckRequest(service="liveness"))).status == HealthCheckResponse.SERVING
        assert not worker.num_calls
        assert len(uploads._reading) <= uploads._most
        for call in calls:
            call.cancel()


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.mark.parametrize("most", [8, 28])
@pytest.mark.parametrize("num_hosts", [1, 3])
@pytest.mark.parametrize("num_connections", [1, 4, pytest.param(12, marks=pytest.mark.slow)])
async def test_slow_uploads_of_hosts_with_many_give_way_and_those_of_others_arrive(
    most: int, num_hosts: int, num_connections: int
) -> None:
    """Each of a host's calls comes again as soon as it is refused."""
    uploads = Uploads(most)
    num_refused = 0

    async def come_again(peer: str) -> None:
        nonlocal num_refused
        while True:
            try:
                await uploads.read(Caller(peer))  # type: ignore[arg-type]
            except RequestRefused:
                num_refused += 1
                await asyncio.sleep(0)

    peers = [f"ipv4:6.6.6.{host}:{port}" for host in range(num_hosts) for port in range(num_connections)]
    flood = [asyncio.create_task(come_again(peer)) for peer in peers for _ in range(8)]
    await turns(20)
    slow = [Caller(f"ipv4:10.0.0.{host}:5") for host in range(most // (num_hosts + 1))]
    reading = [asyncio.create_task(uploads.read(call)) for call in slow]  # type: ignore[arg-type]
    await turns(200)
    assert len(uploads._reading) == min(most, len(peers) * 8 + len(slow))
    for call in slow:
        call.sent.set()
    assert await asyncio.gather(*reading) == [b""] * len(slow)
    assert num_refused > 100 or len(peers) * 8 + len(slow) <= most
    for task in flood:
        task.cancel()
    await asyncio.gather(*flood, return_exceptions=True)
    assert not uploads._reading


async def test_a_host_s_connection_with_many_uploads_gives_way_to_its_other_connections() -> None:
    uploads = Uploads(8)
    many = [asyncio.create_task(uploads.read(Caller("ipv4:10.0.0.1:1"))) for _ in range(8)]  # type: ignore[arg-type]
    await turns(2)
    one = Caller("ipv4:10.0.0.1:2")
    reading = asyncio.create_task(uploads.read(one))  # type: ignore[arg-type]
    await turns(5)
    assert [task.done() for task in many] == [True] + [False] * 7
    one.sent.set()
    assert await reading == b""
    for task in many:
        task.cancel()
    await asyncio.gather(*many, return_exceptions=True)

"""How many calls a client may have open, how much of them lies in memory unread, and that others do not notice."""

import asyncio
import ctypes
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import httpx2
import pytest

from tests.router.cluster import Cluster, Refusal, cluster, refusal, until
from tests.router.fake_worker import FakeWorker
from trunkline.names import TENANT_KEY
from trunkline.v1.inference_pb2 import GenerateRequest, TokenizeRequest
from trunkline_bench.attacks.vectors.frames import Connection, grpc_message, request_headers
from trunkline_router.access.gate import reading, request_gate
from trunkline_router.access.gate.places import BYTE_BOUNDS, WATCH_BOUNDS, Bounds, request_bounds
from trunkline_router.access.gate.reading import READ_BOUNDS, Reading
from trunkline_router.edge.http_call import Edge
from trunkline_runtime import server

GENERATE = "/trunkline.v1.InferenceService/Generate"
CHECK, WATCH = "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"
HAS_PROC = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is looked up in /proc")


def rss_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) / 256


def lone_channel(router: Cluster) -> grpc.aio.Channel:
    """With a connection of its own."""
    return grpc.aio.insecure_channel(f"127.0.0.1:{router.port}", options=(("grpc.use_local_subchannel_pool", 1),))


def open_watch(channel: grpc.aio.Channel) -> grpc.aio.UnaryStreamCall[bytes, bytes]:
    method: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(WATCH)
    return method(b"")


def health_check(channel: grpc.aio.Channel) -> grpc.aio.UnaryUnaryCall[bytes, bytes]:
    method: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(CHECK)
    return method(b"")


async def outcome(call: Any) -> grpc.StatusCode:
    code: grpc.StatusCode = await call.code()
    return code


def gate_with(monkeypatch: pytest.MonkeyPatch, **bounds: Bounds) -> None:
    """The routers that start from now on have these bounds."""
    for name, value in bounds.items():
        monkeypatch.setattr(request_gate, name, value)


async def test_a_tenant_has_so_many_calls_open_and_others_have_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    gate_with(monkeypatch, REQUEST_BOUNDS=request_bounds(8, 5))
    worker = FakeWorker("a", answer=None)
    async with cluster(worker) as router:

        def call(tenant: str) -> Any:
            return router.stub.Generate(GenerateRequest(text="x"), metadata=((TENANT_KEY, tenant),))

        running = []
        for tenant, fits in [("hog", True)] * 5 + [("hog", False), ("b", True), ("c", True), ("d", False)]:
            if fits:
                running.append(call(tenant))
                await worker.arrived.get()
                continue
            refused = await refusal(call(tenant))
            assert (refused.code, refused.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "OVERLOADED")
            assert refused.retry_s
        for one in running:
            one.cancel()
        await until(lambda: worker.num_running == 0)
        again = call("d")
        await worker.arrived.get()
        again.cancel()
        await until(lambda: worker.num_running == 0)


async def test_calls_that_are_no_requests_take_no_places_of_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    most = WATCH_BOUNDS.of_connection
    gate_with(monkeypatch, REQUEST_BOUNDS=request_bounds(4, 2))
    async with cluster(FakeWorker("a")) as router, lone_channel(router) as channel, lone_channel(router) as other:
        watches = [open_watch(channel) for _ in range(most)]
        for watch in watches:
            await watch.read()
        assert (await refusal(open_watch(channel))).reason == "OVERLOADED"
        assert await outcome(health_check(other)) == grpc.StatusCode.OK
        await router.answer("x")
        for watch in watches:
            watch.cancel()


@pytest.mark.parametrize("method", [CHECK, WATCH])
@pytest.mark.parametrize("is_half_open", [True, False])
async def test_a_check_of_health_is_answered_and_a_watch_begins_whatever_others_keep_open(
    monkeypatch: pytest.MonkeyPatch, method: str, is_half_open: bool
) -> None:
    bounds = Bounds(in_all=60, of_host=50, of_connection=40, of_tenant=60)
    gate_with(monkeypatch, CHECK_BOUNDS=bounds, WATCH_BOUNDS=bounds)
    async with cluster(FakeWorker("a")) as router:
        connections = [Connection(router.port) for _ in range(5)]
        for connection in connections:
            body = None if is_half_open else grpc_message(b"")
            assert connection.open_streams(30, request_headers(method), body=body, ends=not is_half_open)
            assert connection.open_streams(30, request_headers(WATCH), body=body, ends=not is_half_open)
        gate: request_gate.RequestGate = router.gate
        await until(lambda: gate.watches.num_held == bounds.of_host)
        async with lone_channel(router) as kubelet:
            for _ in range(3):
                assert await outcome(health_check(kubelet)) == grpc.StatusCode.OK
            watch = open_watch(kubelet)
            assert await watch.read() is not grpc.aio.EOF
            watch.cancel()
        await router.answer("x")
        for connection in connections:
            connection.close()
        await until(lambda: gate.watches.num_held == gate.checks.num_held == 0)


async def test_a_watch_that_is_given_up_for_a_client_with_fewer_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    gate_with(monkeypatch, WATCH_BOUNDS=Bounds(in_all=4, of_host=3, of_connection=3, of_tenant=4))
    async with cluster(FakeWorker("a")) as router, lone_channel(router) as channel, lone_channel(router) as other:
        watches: list[grpc.aio.UnaryStreamCall[bytes, bytes]] = []
        for _ in range(3):
            watches.append(open_watch(channel))
            await watches[-1].read()
        theirs = open_watch(other)
        assert await theirs.read() is not grpc.aio.EOF
        refused = await refusal(watches[0])
        assert (refused.code, refused.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "OVERLOADED")
        for watch in (*watches, theirs):
            watch.cancel()


async def test_one_client_with_invented_tenants_and_half_open_calls_refuses_nobody_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate_with(monkeypatch, REQUEST_BOUNDS=request_bounds(400, 200))
    async with cluster(FakeWorker("a")) as router:
        connections = [Connection(router.port) for _ in range(8)]
        for number, connection in enumerate(connections):
            for name in range(20):
                assert connection.open_streams(5, request_headers(GENERATE, {TENANT_KEY: f"t{number}-{name}"}))
        gate: request_gate.RequestGate = router.gate
        await until(lambda: gate.requests.num_held == 350)
        for _ in range(3):
            await asyncio.wait_for(router.answer("x"), 60)
        for connection in connections:
            connection.close()
        await until(lambda: gate.requests.num_held == 0)


@HAS_PROC
async def test_what_waits_to_be_read_stays_with_its_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixty connections send 4 MiB each while other calls are being read."""
    monkeypatch.setattr(reading, "LONG_S", 3600.0)
    monkeypatch.setattr(request_gate, "Reading", lambda: Reading(Bounds(4, of_host=4, of_connection=4, of_tenant=4)))
    async with cluster(FakeWorker("a")) as router:
        await router.answer("x")
        with_nothing_to_say = Connection(router.port)  # its calls hold all places
        assert with_nothing_to_say.open_streams(4, request_headers(GENERATE))
        gate: request_gate.RequestGate = router.gate
        await until(lambda: gate.reading._places.num_held == 4)
        before = rss_mib()
        sender = await asyncio.create_subprocess_exec(
            sys.executable, "-c", SENDER, f"127.0.0.1:{router.port}", stdin=asyncio.subprocess.PIPE
        )
        await until(lambda: len(gate.reading._waiting) == SENDERS)
        async with lone_channel(router) as kubelet:
            assert await outcome(health_check(kubelet)) == grpc.StatusCode.OK
        assert rss_mib() - before < SENT_MIB / 4
        sender.kill()
        await sender.wait()
        with_nothing_to_say.close()
        await until(lambda: not gate.reading._waiting and not gate.reading._places.num_held)


SENDERS, SENT_MIB = 60, 240
SENDER = f"""
import asyncio, sys, grpc
from trunkline.v1.inference_pb2 import TokenizeRequest
message = TokenizeRequest(text="x" * (4 << 20)).SerializeToString()
async def send():
    options = (("grpc.use_local_subchannel_pool", 1),)
    channels = [grpc.aio.insecure_channel(sys.argv[1], options=options) for _ in range({SENDERS})]
    method, metadata = "/trunkline.v1.InferenceService/Tokenize", (("{TENANT_KEY}", "hog"),)
    await asyncio.gather(*(channel.unary_unary(method)(message, metadata=metadata) for channel in channels))
asyncio.run(send())
"""


async def test_half_open_calls_of_many_connections_hold_up_no_other_client(monkeypatch: pytest.MonkeyPatch) -> None:
    async with cluster(FakeWorker("a")) as router:
        connections = [Connection(router.port) for _ in range(20)]
        for connection in connections:
            assert connection.open_streams(50, request_headers(GENERATE))
        gate: request_gate.RequestGate = router.gate
        await until(lambda: gate.requests.num_held > READ_BOUNDS.in_all)
        for _ in range(5):
            await asyncio.wait_for(router.answer("x"), 60)
        for connection in connections:
            connection.close()
        await until(lambda: gate.requests.num_held == 0)


@HAS_PROC
async def test_idle_connections_are_cheap_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 400)
    async with cluster(FakeWorker("a")) as router:
        await router.answer("x")
        before = rss_mib()
        connections = [Connection(router.port) for _ in range(350)]
        await router.answer("x")
        assert rss_mib() - before < 60
        connections += [Connection(router.port) for _ in range(100)]
        await until(lambda: sum(map(is_closed, connections)) >= 40)
        await router.answer("x")
        for connection in connections:
            connection.close()


def is_closed(connection: Connection) -> bool:
    """Whether the server has closed it."""
    try:
        connection._socket.setblocking(False)
        while connection._socket.recv(1 << 16):
            pass
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


async def test_a_call_without_a_message_is_refused() -> None:
    async with cluster(FakeWorker("a")) as router, lone_channel(router) as channel:
        method: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(GENERATE)
        call = method(iter(()))
        refused = await _refusal_of_stream(call)
        assert (refused.reason, refused.field) == ("INVALID_REQUEST", "request")


async def _refusal_of_stream(call: Any) -> Refusal:
    try:
        async for _ in call:
            pass
    except grpc.aio.AioRpcError as error:
        return Refusal(error)
    raise AssertionError("the call succeeded")


@HAS_PROC
async def test_a_refused_request_leaves_no_memory_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the collector, which may be a long time coming."""
    monkeypatch.setattr(request_gate, "BYTE_BOUNDS", replace(BYTE_BOUNDS, of_connection=1))
    request = TokenizeRequest(text="x" * (1 << 20))
    async with cluster(FakeWorker("a")) as router:
        await router.answer("x")
        assert (await refusal(router.stub.Tokenize(request))).reason == "OVERLOADED"
        with no_memory_kept():
            for _ in range(60):
                await refusal(router.stub.Tokenize(request))


@HAS_PROC
async def test_a_body_that_is_refused_over_http_leaves_no_memory_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_gate, "BYTE_BOUNDS", replace(BYTE_BOUNDS, of_connection=1))
    content, headers = b'{"prompt": "' + b"x" * (1 << 20) + b'"}', {"content-type": "application/json"}
    async with cluster(FakeWorker("a"), edge=Edge) as router, httpx2.AsyncClient(timeout=60, trust_env=False) as http:

        async def status() -> int:
            url = f"http://127.0.0.1:{router.http_port}/v1/completions"
            return (await http.post(url, content=content, headers=headers)).status_code

        assert await status() == 429
        with no_memory_kept():
            for _ in range(60):
                await status()


@contextmanager
def no_memory_kept() -> Iterator[None]:
    """Checks that little memory is in use afterwards, although the collector did not run."""
    trim = ctypes.CDLL(None).malloc_trim
    trim(0)
    before = rss_mib()
    gc.disable()
    try:
        yield
        trim(0)  # what is free again may stay with the process
        assert rss_mib() - before < 30
    finally:
        gc.enable()

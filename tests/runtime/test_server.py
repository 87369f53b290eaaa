"""The server of all processes: errors, health, ports."""

import asyncio
import re
import time
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.runtime.unimplemented_service import UnimplementedService
from trunkline.client.client import Client
from trunkline.errors import InternalError, InvalidRequest, Overloaded, TrunklineError
from trunkline.status import ERROR_DOMAIN, RequestRefused, invalid, no_worker
from trunkline.v1.generation_pb2 import OutputChunk
from trunkline.v1.inference_pb2 import GenerateResponse, ListModelsRequest, ListModelsResponse
from trunkline.v1.inference_pb2_grpc import InferenceServiceStub, add_InferenceServiceServicer_to_server
from trunkline_bench.servers.ports import free_port
from trunkline_runtime.errors import rich_status
from trunkline_runtime.server import GrpcServer, PortInUse, check_port_is_free

SERVICE = "trunkline.v1.InferenceService"


class Failing(UnimplementedService):
    """Raises what it is told to."""

    error: Exception = RuntimeError("secret internals")

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[GenerateResponse]:
        yield GenerateResponse(request_id="r")
        raise self.error

    async def ListModels(self, request: Any, context: Any) -> ListModelsResponse:
        raise self.error


@pytest.fixture
async def server() -> AsyncIterator[tuple[GrpcServer, Failing]]:
    failing = Failing()
    made = GrpcServer("127.0.0.1", 0, services=[SERVICE])
    add_InferenceServiceServicer_to_server(failing, made.grpc)
    await made.start()
    yield made, failing
    await made.stop(0)


async def outcome(server: GrpcServer, method: str) -> TrunklineError:
    async with Client(f"127.0.0.1:{server.port}") as client:
        with pytest.raises(TrunklineError) as caught:
            await (client.list_models() if method == "unary" else client.complete("x"))
        return caught.value


@pytest.mark.parametrize("method", ["unary", "stream"])
async def test_an_unexpected_error_is_internal_without_internals(
    server: tuple[GrpcServer, Failing], method: str, capsys: pytest.CaptureFixture[str]
) -> None:
    error = await outcome(server[0], method)
    assert isinstance(error, InternalError)
    assert "secret" not in str(error)
    assert error.reason == "INTERNAL"
    found = re.search(r"under request ([0-9a-f]{32})$", str(error))
    assert found is not None
    printed = capsys.readouterr()
    assert found[1] in printed.out + printed.err, "so that it can be found in the log"


async def test_an_unexpected_error_names_the_request_where_it_has_a_name(server: tuple[GrpcServer, Failing]) -> None:
    async with Client(f"127.0.0.1:{server[0].port}") as client:
        with pytest.raises(InternalError, match="under request r-19"):
            await client.complete("x", request_id="r-19")


@pytest.mark.parametrize("method", ["unary", "stream"])
async def test_a_refusal_reaches_the_client_as_its_own_exception(
    server: tuple[GrpcServer, Failing], method: str
) -> None:
    server[1].error = invalid("sampling.top_p", "no")
    error = await outcome(server[0], method)
    assert isinstance(error, InvalidRequest)
    assert error.field == "sampling.top_p"
    server[1].error = RequestRefused(8, "OVERLOADED", "full", retry_delay_ms=1500)
    error = await outcome(server[0], method)
    assert isinstance(error, Overloaded)
    assert error.retry_after_s == 1.5


def test_statuses_carry_google_rpc_details() -> None:
    info, bad, retry = ErrorInfo(), BadRequest(), RetryInfo()
    status = rich_status(invalid("n", "too large"))
    assert status.details[0].Unpack(info)
    assert (info.reason, info.domain) == ("INVALID_REQUEST", ERROR_DOMAIN)
    assert status.details[1].Unpack(bad)
    assert bad.field_violations[0].field == "n"
    assert rich_status(no_worker("gone")).details[1].Unpack(retry)
    assert retry.retry_delay.ToMilliseconds() == 1000


async def test_a_refusal_that_quotes_a_long_text_keeps_its_status(server: tuple[GrpcServer, Failing]) -> None:
    server[1].error = invalid("model", "x" * 100_000)
    error = await outcome(server[0], "unary")
    assert isinstance(error, InvalidRequest)
    assert error.field == "model"


async def test_alive_at_once_ready_when_told(server: tuple[GrpcServer, Failing]) -> None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server[0].port}") as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)

        async def status(service: str) -> int:
            value: int = (await stub.Check(health_pb2.HealthCheckRequest(service=service))).status
            return value

        serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
        assert [await status(name) for name in ("liveness", "readiness", "", SERVICE)] == [serving, *[not_serving] * 3]
        await server[0].set_ready(True)
        assert [await status(name) for name in ("liveness", "readiness", "", SERVICE)] == [serving] * 4


async def test_a_taken_port_is_one_clear_line(server: tuple[GrpcServer, Failing]) -> None:
    port = server[0].port
    with pytest.raises(PortInUse, match=f"port {port} on 127.0.0.1 is in use"):
        check_port_is_free("127.0.0.1", port)
    with pytest.raises(PortInUse, match=f"port {port}"):
        await GrpcServer("127.0.0.1", port, services=[]).start()
    check_port_is_free("127.0.0.1", free_port())


async def test_a_connection_grows_old_without_a_call_noticing() -> None:
    peers: list[str] = []
    going_on = asyncio.Event()

    class Slow(UnimplementedService):
        async def Generate(self, request: Any, context: Any) -> AsyncIterator[GenerateResponse]:
            yield GenerateResponse(request_id="r", chunks=[OutputChunk(index=0, text="a")])
            await going_on.wait()
            yield GenerateResponse(request_id="r", chunks=[OutputChunk(index=0, text="b")])

        async def ListModels(self, request: Any, context: Any) -> ListModelsResponse:
            peers.append(context.peer())
            return ListModelsResponse()

    server = GrpcServer("127.0.0.1", 0, services=[SERVICE], max_connection_age_s=0.3)
    add_InferenceServiceServicer_to_server(Slow(), server.grpc)
    await server.start()
    async with Client(f"127.0.0.1:{server.port}") as client:
        pieces = client.generate("x")
        assert (await anext(pieces)).text == "a"
        while len(set(peers)) < 3:  # each of these calls succeeds
            await client.list_models()
        going_on.set()
        assert [piece.text async for piece in pieces] == ["b"]
    await server.stop(0)


async def test_a_flood_of_calls_delays_others_for_a_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trunkline_runtime.server.MAX_UNACCEPTED_S", 1)

    class Busy(UnimplementedService):
        async def ListModels(self, request: Any, context: Any) -> ListModelsResponse:
            time.sleep(0.01)  # noqa: ASYNC251  # computes
            return ListModelsResponse()

    server = GrpcServer("127.0.0.1", 0, services=[SERVICE])
    add_InferenceServiceServicer_to_server(Busy(), server.grpc)
    await server.start()
    own_connection = (("grpc.use_local_subchannel_pool", 1),)
    async with (
        grpc.aio.insecure_channel(f"127.0.0.1:{server.port}", own_connection) as flooding,
        grpc.aio.insecure_channel(f"127.0.0.1:{server.port}", own_connection) as innocent,
    ):
        stub: Any = InferenceServiceStub(flooding)
        flood = [stub.ListModels(ListModelsRequest()) for _ in range(900)]  # nine seconds of work
        stub = InferenceServiceStub(innocent)
        began_s, calls = time.monotonic(), []
        for _ in range(20):
            calls.append(stub.ListModels(ListModelsRequest()))
            await asyncio.sleep(0.1)
        assert await calls[-1].code() is grpc.StatusCode.OK
        assert time.monotonic() - began_s < 6, "without a bound it waits for nine seconds"
        flooded = Counter([await call.code() for call in flood])
        assert set(flooded) == {grpc.StatusCode.OK, grpc.StatusCode.CANCELLED}
    await server.stop(0)

"""gRPC clients retry a refused call only if its status comes without a message."""

import json
from typing import Any

import grpc
import pytest

from trunkline.status import no_worker
from trunkline_runtime.errors import ErrorInterceptor

ATTEMPTS = 4


@pytest.mark.parametrize("kind", ["unary_unary", "unary_stream"])
async def test_a_refused_call_is_tried_again(kind: str) -> None:
    num_calls = 0

    async def refuse_one(request: bytes, context: Any) -> bytes:
        nonlocal num_calls
        num_calls += 1
        raise no_worker("not now")

    async def refuse_many(request: bytes, context: Any) -> Any:
        yield await refuse_one(request, context)

    make = getattr(grpc, f"{kind}_rpc_method_handler")
    behaviour = refuse_one if kind == "unary_unary" else refuse_many
    handlers = {"Call": make(behaviour, request_deserializer=bytes, response_serializer=bytes)}
    server = grpc.aio.server(interceptors=(ErrorInterceptor(),))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Service", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    policy = {
        "maxAttempts": ATTEMPTS,
        "initialBackoff": "0.01s",
        "maxBackoff": "0.01s",
        "backoffMultiplier": 1,
        "retryableStatusCodes": ["UNAVAILABLE"],
    }
    config = json.dumps({"methodConfig": [{"name": [{}], "retryPolicy": policy}]})
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=(("grpc.service_config", config),)) as channel:
        call: Any = getattr(channel, kind)("/test.Service/Call")(b"x", timeout=30)
        assert await call.code() is grpc.StatusCode.UNAVAILABLE
        assert await call.details() == "not now"
    await server.stop(None)
    assert num_calls == ATTEMPTS

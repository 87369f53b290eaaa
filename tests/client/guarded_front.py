"""A server with TLS that admits calls with one key and forwards them, in bytes, to a router without either."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc

from tests.client.certificates import Certificates
from trunkline.status import CODE_UNAUTHENTICATED, UNAUTHENTICATED, RequestRefused
from trunkline_runtime.errors import abort_with

Accepts = Callable[[str], bool]
STREAMING = ("/trunkline.v1.InferenceService/Generate", "/grpc.health.v1.Health/Watch")


class _Forwarder(grpc.GenericRpcHandler):
    def __init__(self, channel: grpc.aio.Channel, accepts: Accepts) -> None:
        self._channel = channel
        self._accepts = accepts

    def service(self, handler_call_details: Any) -> Any:
        method = handler_call_details.method
        if method in STREAMING:
            return grpc.unary_stream_rpc_method_handler(self._streaming(method))
        return grpc.unary_unary_rpc_method_handler(self._unary(method))

    def _streaming(self, method: str) -> Any:
        async def forward(request: bytes, context: Any) -> AsyncIterator[bytes]:
            await self._admit(context)
            call: Any = self._channel.unary_stream(method)  # bytes to bytes
            async for response in call(request):
                yield response

        return forward

    def _unary(self, method: str) -> Any:
        async def forward(request: bytes, context: Any) -> Any:
            await self._admit(context)
            call: Any = self._channel.unary_unary(method)  # bytes to bytes
            return await call(request)

        return forward

    async def _admit(self, context: Any) -> None:
        given = dict(context.invocation_metadata()).get("authorization", "")
        if not self._accepts(given.removeprefix("Bearer ")):
            await abort_with(context, RequestRefused(CODE_UNAUTHENTICATED, UNAUTHENTICATED, "the key is not valid"))


@asynccontextmanager
async def guarded_front(router: str, certificates: Certificates, accepts: Accepts) -> AsyncIterator[int]:
    """Its port on 127.0.0.1."""
    async with grpc.aio.insecure_channel(router) as channel:
        server = grpc.aio.server()
        server.add_generic_rpc_handlers((_Forwarder(channel, accepts),))
        port = server.add_secure_port("127.0.0.1:0", certificates.server_credentials())
        await server.start()
        yield port
        await server.stop(0)

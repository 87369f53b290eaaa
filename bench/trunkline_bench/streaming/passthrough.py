"""A hop that passes bytes on unchanged: the least that a hop in Python costs with this gRPC library.

usage: python -m trunkline_bench.streaming.passthrough host:port     (prints its port)

It serves only server-streaming calls, and makes one call to the server behind for each, over one connection.
"""

import contextlib
import sys
from typing import Any

import grpc
import uvloop

from trunkline_bench.streaming.source import SERVER_OPTIONS
from trunkline_runtime.channel import open_channel


class Passthrough(grpc.GenericRpcHandler):
    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> "grpc.RpcMethodHandler[bytes, bytes]":
        behind: Any = self._channel.unary_stream(handler_call_details.method)

        async def pass_on(request: bytes, context: Any) -> None:
            call = behind(request)
            try:
                async for response in call:
                    await context.write(response)
            finally:
                call.cancel()

        return grpc.unary_stream_rpc_method_handler(pass_on)


async def serve(address: str) -> None:
    async with open_channel(address) as channel:
        server = grpc.aio.server(handlers=[Passthrough(channel)], options=SERVER_OPTIONS)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        print(port, flush=True)
        await server.wait_for_termination()


def main() -> None:
    with contextlib.suppress(KeyboardInterrupt):
        uvloop.run(serve(sys.argv[1]))


if __name__ == "__main__":
    main()

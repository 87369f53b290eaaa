"""The event loop is woken once for all operations that end at the same time."""

import subprocess
import sys
from textwrap import dedent

CALLS = 500


def test_the_wake_ups_of_many_operations_are_read_at_once() -> None:
    """Runs in a process of its own, because grpc.aio is set up once in a process."""
    program = f"""
        import asyncio
        import socket
        from typing import Any

        import grpc

        from trunkline_runtime import wake_ups

        make_pair, read = socket.socketpair, []


        class Counted(wake_ups._ReadAtOnce):
            def recv(self, *arguments: Any) -> bytes:
                read.append(len(found := super().recv(*arguments)))
                return found


        async def answer(requests: Any, context: Any) -> bytes:
            return await context.read()


        async def main() -> None:
            wake_ups._ReadAtOnce = Counted
            assert wake_ups.read_wake_ups_at_once()
            assert not wake_ups.read_wake_ups_at_once(), "grpc.aio has its socket already"
            assert socket.socketpair is make_pair
            server = grpc.aio.server()
            handlers = {{"Call": grpc.stream_unary_rpc_method_handler(answer)}}
            server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Service", handlers),))
            port = server.add_insecure_port("127.0.0.1:0")
            await server.start()
            async with grpc.aio.insecure_channel(f"127.0.0.1:{{port}}") as channel:
                call = channel.unary_unary("/test.Service/Call")
                answers = await asyncio.gather(*(call(b"%d" % number) for number in range({CALLS})))
            assert answers == [b"%d" % number for number in range({CALLS})]
            await server.stop(None)
            assert max(read) > 1, "single bytes were read"
            assert len(read) < sum(read) / 2


        asyncio.run(main())
    """
    ended = subprocess.run([sys.executable, "-c", dedent(program)], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr

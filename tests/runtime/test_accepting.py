"""New calls do not queue behind one another for the event loop's attention, and a server that stops leaves none."""

import asyncio
from collections import Counter
from typing import Any

import grpc
from grpc._cython import cygrpc

from trunkline_runtime.accepting import (
    AT_ONCE,
    BEGUN_IN_A_TURN,
    MAX_WAITING,
    MAX_WAITING_OF_CONNECTION,
    ArrivedCalls,
    eager_server,
)

METHOD = "/test.Service/Call"
PATIENCE_S = 60.0  # for what takes milliseconds


class Turns:
    """Counts the turns of the running event loop until it is closed."""

    def __init__(self) -> None:
        self.number = 0
        self._loop = asyncio.get_running_loop()
        self._handle = self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        self.number += 1
        self._handle = self._loop.call_soon(self._turn)

    def close(self) -> None:
        self._handle.cancel()


async def serve(behaviour: Any) -> tuple[grpc.aio.Server, int]:
    """A server with one method that takes bytes and gives bytes, and its port."""
    server = eager_server()
    handler = grpc.stream_unary_rpc_method_handler(behaviour)  # which begins before it reads
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Service", {"Call": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    return server, port


async def test_several_calls_that_come_together_begin_in_one_turn_of_the_event_loop() -> None:
    begun: Counter[int] = Counter()  # by turn
    turns = Turns()

    async def answer(requests: Any, context: Any) -> bytes:
        begun[turns.number] += 1
        return await context.read()

    server, port = await serve(answer)
    try:
        async with asyncio.timeout(PATIENCE_S), grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            call: Any = channel.unary_unary(METHOD)
            while max(begun.values(), default=0) < 2:  # where one call is accepted at a time, this never comes
                answers = await asyncio.gather(*(call(bytes([number])) for number in range(4 * AT_ONCE)))
                assert answers == [bytes([number]) for number in range(4 * AT_ONCE)]
        assert max(begun.values()) <= BEGUN_IN_A_TURN
    finally:
        turns.close()
        await server.stop(None)


async def test_a_server_that_stops_while_calls_come_ends_every_one_of_them() -> None:
    began = asyncio.Event()

    async def answer(requests: Any, context: Any) -> bytes:
        began.set()
        await asyncio.sleep(0)
        return await context.read()

    server, port = await serve(answer)
    outcomes: Counter[grpc.StatusCode] = Counter()
    async with asyncio.timeout(PATIENCE_S), grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        method: Any = channel.unary_unary(METHOD)

        async def call_until_it_fails() -> None:
            while True:
                call = method(b"x")
                code = await call.code()
                outcomes[code] += 1
                if code is not grpc.StatusCode.OK:
                    return

        calling = [asyncio.create_task(call_until_it_fails()) for _ in range(8 * AT_ONCE)]
        await began.wait()
        await server.stop(PATIENCE_S)
        await asyncio.gather(*calling)
    assert outcomes[grpc.StatusCode.OK]
    assert set(outcomes) <= {grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED}


def test_a_connection_with_many_calls_has_one_begun_for_each_of_the_others() -> None:
    arrived: ArrivedCalls[tuple[str, int]] = ArrivedCalls()
    for number in range(500):
        arrived.add("busy", ("busy", number))
    for number in range(2):
        arrived.add("quiet", ("quiet", number))
        arrived.add("other", ("other", number))
    assert [arrived.next() for _ in range(7)] == [
        ("busy", 0), ("quiet", 0), ("other", 0), ("busy", 1), ("quiet", 1), ("other", 1), ("busy", 2),
    ]  # fmt: skip
    assert [arrived.next() for _ in range(len(arrived))] == [("busy", number) for number in range(3, 500)]
    assert not arrived


def test_of_calls_that_a_connection_cannot_have_open_together_the_oldest_are_dropped() -> None:
    arrived: ArrivedCalls[int] = ArrivedCalls()
    for number in range(3 * MAX_WAITING_OF_CONNECTION):
        arrived.add("busy", number)
    arrived.add("quiet", -1)
    assert len(arrived) == MAX_WAITING_OF_CONNECTION + 1
    assert [arrived.next(), arrived.next()] == [2 * MAX_WAITING_OF_CONNECTION, -1]


def test_where_too_many_calls_wait_those_of_the_busiest_connection_are_dropped() -> None:
    arrived: ArrivedCalls[str] = ArrivedCalls()
    for number in range(MAX_WAITING_OF_CONNECTION):
        for name in ("first", "second", "third", "fourth", "fifth"):
            arrived.add(name, name)
            assert len(arrived) <= MAX_WAITING
        if number % 10 == 0:
            arrived.add("quiet", f"quiet {number}")
    waiting = Counter(arrived.next() for _ in range(len(arrived)))
    assert sum(name.startswith("quiet") for name in waiting) == MAX_WAITING_OF_CONNECTION // 10
    for number in range(2 * MAX_WAITING):
        arrived.add(f"connection {number}", "x")
    assert len(arrived) == MAX_WAITING, "with one call each, a connection is forgotten with its call"
    assert [arrived.next() for _ in range(MAX_WAITING)] == ["x"] * MAX_WAITING


async def test_a_server_stops_without_a_call() -> None:
    async def answer(requests: Any, context: Any) -> bytes:
        return await context.read()

    async with asyncio.timeout(PATIENCE_S):
        server, _ = await serve(answer)
        await server.stop(None)


def test_other_servers_of_the_process_are_made_as_ever() -> None:
    assert cygrpc.AioServer.__module__.startswith("grpc.")

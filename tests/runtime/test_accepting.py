"""New calls do not wait for separate turns of the event loop, and a server that stops leaves no call behind."""

import asyncio
import time
from collections import Counter
from typing import Any

import grpc
import pytest
from grpc._cython import cygrpc  # type: ignore[attr-defined]  # the stubs leave it out

from trunkline_runtime.accepting import (
    AT_ONCE,
    BEGUN_IN_A_TURN,
    DROPPED_TOGETHER,
    MAX_WAITING,
    MAX_WAITING_OF_CONNECTION,
    ArrivedCalls,
    eager_server,
)

METHOD = "/test.Service/Call"
PATIENCE_S = 60.0  # for operations that take milliseconds
GRACE_S = 1.0
MOST_ADDITION_S = 0.1
TRIES = 3  # a slow addition is slow each time; a collection of garbage or a shared core is not


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
    """A server with one method that takes and returns bytes, and its port."""
    server = eager_server()
    # `behaviour` begins before it reads.
    handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_unary_rpc_method_handler(behaviour)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Service", {"Call": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    return server, port


async def test_several_calls_that_come_together_begin_in_one_turn_of_the_event_loop() -> None:
    begun: Counter[int] = Counter()  # by turn
    turns = Turns()

    async def answer(requests: Any, context: Any) -> bytes:
        begun[turns.number] += 1
        message: bytes = await context.read()
        return message

    server, port = await serve(answer)
    try:
        async with asyncio.timeout(PATIENCE_S), grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            call: Any = channel.unary_unary(METHOD)
            while max(begun.values(), default=0) < 2:  # if one call were accepted at a time, this would never happen
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
        message: bytes = await context.read()
        return message

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
        # Once in many stops gRPC, also without eager_server(), waits for a call that is nowhere, until the grace ends.
        await server.stop(GRACE_S)
        await asyncio.gather(*calling)
    assert outcomes[grpc.StatusCode.OK]
    assert set(outcomes) <= {grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED}


def test_hosts_take_turns_and_so_do_the_connections_of_a_host() -> None:
    arrived: ArrivedCalls[str] = ArrivedCalls()
    for number in range(500):
        arrived.add("busy", "busy:1", f"busy:1 {number}")
        arrived.add("busy", "busy:2", f"busy:2 {number}")
    for number in range(2):
        arrived.add("quiet", "quiet:1", f"quiet:1 {number}")
    assert [arrived.next() for _ in range(5)] == ["busy:1 0", "quiet:1 0", "busy:2 0", "quiet:1 1", "busy:1 1"]
    rest = [arrived.next() for _ in range(len(arrived))]
    busy = {f"busy:{one} {number}" for one in (1, 2) for number in range(500)}
    assert set(rest) == busy - {"busy:1 0", "busy:2 0", "busy:1 1"}
    assert len(rest) == len(set(rest))
    assert not arrived


def test_a_connection_has_no_more_calls_waiting_than_it_may_have_open() -> None:
    arrived: ArrivedCalls[int] = ArrivedCalls()
    dropped = [arrived.add("host", "host:1", number) for number in range(3 * MAX_WAITING_OF_CONNECTION)]
    assert dropped == [0] * MAX_WAITING_OF_CONNECTION + [1] * 2 * MAX_WAITING_OF_CONNECTION
    assert arrived.add("host", "host:2", -1) == 0
    assert [arrived.next() for _ in range(len(arrived))] == [0, -1, *range(1, MAX_WAITING_OF_CONNECTION)]


@pytest.mark.parametrize("calls_each", [1, 2, 40])
def test_connections_by_the_thousand_of_one_host_cost_others_nothing(calls_each: int) -> None:
    """16 calls start for each 32 that arrive: half of them are dropped, but none of another host."""
    longest_s = [longest_addition_s(calls_each)]
    while longest_s[-1] >= MOST_ADDITION_S and len(longest_s) < TRIES:
        longest_s.append(longest_addition_s(calls_each))
    assert min(longest_s) < MOST_ADDITION_S


def longest_addition_s(calls_each: int) -> float:
    """Floods arrived calls from one host, and returns the longest CPU time that one more took."""
    arrived: ArrivedCalls[str] = ArrivedCalls()
    connections, begun, asked = 2 * MAX_WAITING // calls_each, Counter[str](), 0
    longest_s = 0.0
    for turn in range(1500):
        for number in range(32):
            connection = f"busy:{(32 * turn + number) % connections}"
            started_s = time.thread_time()
            arrived.add("busy", connection, "busy")
            longest_s = max(longest_s, time.thread_time() - started_s)
        if turn % 5 == 0:
            asked += 1
            arrived.add("quiet", "quiet:1", "quiet")
        begun.update(arrived.next() for _ in range(16))
        assert len(arrived) <= MAX_WAITING
    assert begun["quiet"] == asked
    assert begun["busy"] == 16 * 1500 - asked
    return longest_s


def test_of_one_host_the_connections_with_the_most_calls_lose_the_latest() -> None:
    arrived: ArrivedCalls[str] = ArrivedCalls()
    for number in range(MAX_WAITING_OF_CONNECTION):
        for one in range(9):
            arrived.add("host", f"host:{one}", f"{one} {number}")
        if number < 100:
            arrived.add("host", "host:quiet", f"quiet {number}")
    waiting = [arrived.next() for _ in range(len(arrived))]
    assert [each for each in waiting if "quiet" in each] == [f"quiet {number}" for number in range(100)]
    kept = Counter(each.split()[0] for each in waiting if "quiet" not in each)
    assert max(kept.values()) - min(kept.values()) <= DROPPED_TOGETHER / 9 + 1
    assert "0 0" in waiting


async def test_a_server_stops_without_a_call() -> None:
    async def answer(requests: Any, context: Any) -> bytes:
        message: bytes = await context.read()
        return message

    async with asyncio.timeout(PATIENCE_S):
        server, _ = await serve(answer)
        await server.stop(None)


def test_other_servers_of_the_process_are_made_as_ever() -> None:
    assert cygrpc.AioServer.__module__.startswith("grpc.")

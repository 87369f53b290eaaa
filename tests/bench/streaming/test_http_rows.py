"""The benchmark's rows of HTTP."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from trunkline_bench.streaming.bare import Bare
from trunkline_bench.streaming.client import Load, Seen
from trunkline_bench.streaming.processes import HTTP, ROUTER, Hop, Run, hops, run
from trunkline_bench.streaming.tables import REQUEST_STREAMS, request_rows
from trunkline_router.edge.http.server import HttpServer

STEPS_PER_S = 200.0


@asynccontextmanager
async def bare(steps_per_s: float) -> AsyncIterator[str]:
    server = HttpServer(Bare(steps_per_s), "127.0.0.1", 0)
    await server.start()
    yield f"127.0.0.1:{server.port}"
    await server.stop(0)


@pytest.mark.parametrize("text", [False, True])
@pytest.mark.parametrize(("wire", "messages"), [("http", 4), ("http whole", 1)])  # the last event has the usage
async def test_the_server_alone_answers_with_all_tokens(wire: str, messages: int, text: bool) -> None:
    async with bare(0.0) as address:
        load = Load(address, wire, streams=1, max_tokens=3, rounds=2, text=text)
        seen = (await run(Hop(address, wire, os.getpid()), load)).seen
    assert (seen.requests, seen.messages, seen.tokens) == (2, 2 * messages, 6)


async def test_ages_of_paced_tokens_are_read_from_events() -> None:
    async with bare(STEPS_PER_S) as address:
        load = Load(address, "http", streams=2, max_tokens=20, steps_per_s=STEPS_PER_S)
        seen = (await run(Hop(address, "http", os.getpid()), load)).seen
    assert 0 < seen.age_p50_ms <= seen.age_p99_ms < 5000


@pytest.mark.slow
async def test_a_router_has_a_hop_per_protocol_and_both_answer() -> None:
    async with hops(0.0, None, None) as found:
        assert found[HTTP].pid == found[ROUTER].pid
        for hop, wire in ((found[ROUTER], "edge"), (found[HTTP], "http"), (found[HTTP], "http whole")):
            seen = (await run(hop, Load(hop.address, wire, streams=2, max_tokens=5, rounds=2, text=True))).seen
            assert (seen.requests, seen.tokens) == (4, 20)


def test_requests_are_compared_within_each_round() -> None:
    def taken(cpu_s: float) -> Run:
        return Run(Seen(seconds=1.0, requests=10), cpu_s, 0.0, 0.0)

    runs = {
        (ROUTER, REQUEST_STREAMS): [taken(0.01), taken(0.02), taken(0.08)],
        (HTTP, REQUEST_STREAMS): [taken(0.03), taken(0.03), taken(0.12)],
    }
    assert request_rows(runs, "text") == {
        f"{ROUTER}, text": ["10", "2000", "500", "1.00"],
        f"{HTTP}, text": ["10", "3000", "333", "1.50"],
    }

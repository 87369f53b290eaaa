"""The streaming bench's source is a worker as a router wants it, and its client sees every token, whichever way."""

import pytest

from trunkline_bench.streaming.client import Load
from trunkline_bench.streaming.processes import hops, run

STREAMS, TOKENS = 3, 20


@pytest.mark.slow
async def test_every_token_comes_through_each_hop() -> None:
    async with hops(0.0, None, None) as found:
        for name, hop in found.items():
            seen = (await run(hop, Load(hop.address, hop.wire, STREAMS, TOKENS, steps_per_s=1.0))).seen
            assert (seen.tokens, seen.requests) == (STREAMS * TOKENS, STREAMS), name
            assert seen.messages <= seen.tokens + seen.requests, name  # a stream may end with an event without tokens
            assert 0 < seen.age_p50_ms <= seen.age_p99_ms, name

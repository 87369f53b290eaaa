"""Workers are killed under streams over HTTP, and no client notices more than a pause."""

import pytest

from tests.cluster.harmed_fleet import LONG, MANY, STREAMS, TOKENS, HarmedFleet
from tests.worker.engine_rig import DEMO_MODEL
from trunkline_bench.faults.fleet import Fleet
from trunkline_bench.faults.http_accidents import running_http_fleet, struck_over_http, undisturbed_over_http
from trunkline_bench.faults.http_streams import http_orders
from trunkline_bench.faults.main import worker_flags
from trunkline_bench.faults.scenarios import ACCIDENTS

pytestmark = pytest.mark.asyncio(loop_scope="package")

KILLED = "kill -9 of a front"


async def check_that_no_stream_breaks(
    fleet: Fleet, port: int, streams: int, tokens: tuple[int, int], accidents: list[str]
) -> None:
    wanted = http_orders(streams, tokens=tokens)
    expected = await undisturbed_over_http(port, wanted)
    assert not [record.error for record in expected if record.error]
    assert all(record.text.values() for record in expected)
    assert all(record.finish for record in expected)
    for accident in accidents:
        outcome = await struck_over_http(fleet, port, wanted, expected, ACCIDENTS[accident])
        assert outcome.is_clean, (accident, outcome.errors, outcome.differing)
        assert outcome.resumed > 0, f"{accident}: no stream was hit"


async def test_no_stream_over_http_breaks_or_changes_when_its_worker_is_killed(fleet: HarmedFleet) -> None:
    await check_that_no_stream_breaks(fleet.routed, fleet.http_port, MANY, TOKENS, [KILLED])


@pytest.mark.slow
async def test_long_streams_over_http_survive_every_kill() -> None:
    async with running_http_fleet(DEMO_MODEL, *worker_flags(deterministic=True)) as (fleet, port):
        await check_that_no_stream_breaks(fleet, port, STREAMS, LONG, [KILLED, "kill -9 of an engine"])

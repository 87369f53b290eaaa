"""Accidents that happen to a fleet while its streams run over HTTP."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from trunkline_bench.faults.fleet import Fleet, running_fleet
from trunkline_bench.faults.http_streams import HttpOrder, HttpStreams
from trunkline_bench.faults.scenarios import STRIKE_SHARE, Accident, Outcome, compare, recover
from trunkline_bench.faults.streams import Record, busiest_worker
from trunkline_bench.servers.ports import free_port


@asynccontextmanager
async def running_http_fleet(model: Path, *arguments: str) -> AsyncIterator[tuple[Fleet, int]]:
    """Workers before one router, and its HTTP port. `arguments` are for the workers."""
    port = free_port()
    async with running_fleet(model, *arguments, router_arguments=(f"--http-port={port}",)) as fleet:
        yield fleet, port


async def undisturbed_over_http(port: int, wanted: Sequence[HttpOrder]) -> list[Record]:
    return await HttpStreams(port).run(wanted)


async def struck_over_http(
    fleet: Fleet, port: int, wanted: Sequence[HttpOrder], expected: Sequence[Record], accident: Accident
) -> Outcome:
    """Runs all streams, with the accident in the middle. Repairs the fleet afterwards.

    HTTP does not tell that a stream was resumed: those count that began on the victim and ended after the accident."""
    enough = sum(len(text) for record in expected for text in record.text.values()) * STRIKE_SHARE
    strike = asyncio.Event()

    def on_text(total: int) -> None:
        if total >= enough:
            strike.set()

    streams = HttpStreams(port, on_text)
    running = asyncio.create_task(streams.run(wanted))
    await strike.wait()
    victim = fleet.worker(busiest_worker(streams.unfinished))  # to ask the workers would take as long as some streams
    struck_s = time.monotonic()
    await accident(fleet, victim)
    records = await running
    await recover(fleet, victim)
    await fleet.nothing_live()
    for record in records:
        was_hit = record.worker_id == victim.worker_id and bool(record.arrivals_s) and record.arrivals_s[-1] > struck_s
        record.resumptions = int(was_hit)
    outcome = compare(records, expected, struck_s)
    outcome.tokens = sum(record.usage[1] for record in records)
    return outcome

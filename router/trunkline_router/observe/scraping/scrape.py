"""What a scraper is answered: the metrics of this process or, where a router has several, those of all of them."""

import asyncio
import time
from collections.abc import Iterable, Sequence
from itertools import chain

from prometheus_client.core import Metric

from trunkline_router.observe.scraping.merged_snapshots import Snapshot, family_snapshot, merged
from trunkline_router.observe.scraping.metric_sources import Source
from trunkline_router.observe.scraping.snapshot_files import SNAPSHOT_S, SnapshotPlace, read_all
from trunkline_runtime.log import get_logger
from trunkline_runtime.telemetry.exposition import Families, counter


class Scrape:
    """sources: of this process;  place: where it writes for the others of its router; None: it is the only one"""

    def __init__(self, sources: Sequence[Source], place: SnapshotPlace | None = None) -> None:
        self._sources = sources
        self._place = place
        self._writing = asyncio.Lock()

    async def collect(self) -> Families:
        """All metrics of the router, made one by one. Raises OSError if those of the other processes cannot be read."""
        if self._place is None:
            return self._families()
        await self._write(self._place)
        directory = self._place.directory
        snapshots, num_former = await asyncio.to_thread(read_all, directory, time.monotonic())
        return chain(merged(snapshots), [restarts_family(num_former)])

    async def own(self) -> Families:
        """The metrics of this process."""
        return self._families()

    async def run(self) -> None:
        """Tells the other processes until it is cancelled. A failure is logged once; it must not end the router."""
        problem = ""
        while self._place is not None:
            try:
                await self._write(self._place)
                problem = ""
            except Exception as error:
                if str(error) != problem:
                    problem = str(error)
                    get_logger().error("metrics cannot be told to the other processes", exc_info=error)
            await asyncio.sleep(SNAPSHOT_S)

    def _families(self) -> Iterable[Metric]:
        return chain.from_iterable(source() for source in self._sources)

    async def _write(self, place: SnapshotPlace) -> None:
        async with self._writing:
            snapshot: Snapshot = []
            for family in self._families():
                snapshot.append(family_snapshot(family))
                await asyncio.sleep(0)
            await asyncio.to_thread(place.write, snapshot, time.monotonic())


def restarts_family(count: int) -> Metric:
    """Only the scraped process knows it, from the files."""
    return counter(
        "trunkline_router_process_restarts",
        "Processes of the router that died and were replaced. Absent if the router is one process.",
        (),
        [((), float(count))],
    )

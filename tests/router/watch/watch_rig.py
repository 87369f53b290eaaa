"""Watchers of a router's fleet, and reports of its fake workers."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.router.access.callers import Headers, Keys, Router, bearer, router_of
from tests.router.cluster import PATIENCE_S
from trunkline.v1.fleet_pb2 import WatchFleetRequest, WatchFleetResponse, WorkerTile
from trunkline.v1.generation_pb2 import Lane
from trunkline.v1.worker_pb2 import Distribution, GetStatsResponse, LaneStats, StepSample, StepTotals

OPERATOR, ACME, OTHER, SCRAPER, BLIND = "operator", "acme", "other", "scraper", "blind"


def stats(uptime_s: float, *, steps: int = 0, decode: int = 0, prefill: int = 0, hits: int = 0) -> GetStatsResponse:
    """A report, with as many output tokens as decoded ones."""
    return GetStatsResponse(
        uptime_s=uptime_s,
        steps=StepTotals(
            steps=steps,
            decode_tokens=decode,
            prefill_tokens=prefill,
            prefix_hit_tokens=hits,
            device_time_s=uptime_s / 2,
        ),
        last_step=StepSample(sequences=3),
        lanes=[
            LaneStats(
                lane=Lane.LANE_STANDARD,
                running=2,
                output_tokens=decode,
                ttft_s=Distribution(count=9, p50=0.25, p90=0.5, p99=1.0),
                itl_s=Distribution(count=9, p50=0.01),
            )
        ],
    )


class KeyRing:
    """A key for each kind of caller."""

    def __init__(self, folder: Path) -> None:
        self.file = Keys(folder / "keys.json")
        self.of = {
            OPERATOR: self.file.add(tenant="ops", roles=["operator"], acts_for=["*"]),
            ACME: self.file.add(tenant="acme", roles=["user"]),
            OTHER: self.file.add(tenant="other", roles=["user"]),
            SCRAPER: self.file.add(tenant="ops", roles=["scraper"]),
            BLIND: self.file.add(tenant="acme", roles=["user", "operator"], sees_cache=False),
        }

    def headers(self, who: str, tenant: str = "") -> Headers:
        return bearer(self.of[who], tenant) if who else {}


@asynccontextmanager
async def watched_router(keys: KeyRing, *workers: Any, **options: Any) -> AsyncIterator[Router]:
    async with router_of(keys.file, *workers, **options) as router:
        yield router


def watch(router: Any, headers: Headers) -> Any:
    """A WatchFleet call."""
    return router.fleet.WatchFleet(WatchFleetRequest(), metadata=tuple(headers.items()), timeout=PATIENCE_S)


async def until_view(call: Any, condition: Callable[[WatchFleetResponse], bool]) -> WatchFleetResponse:
    """The next view that fulfils the condition."""
    while True:
        view = await call.read()
        assert isinstance(view, WatchFleetResponse), "the stream has ended"
        if condition(view):
            return view


def tile(view: WatchFleetResponse, worker_id: str) -> WorkerTile:
    (found,) = (tile for tile in view.workers if tile.worker_id == worker_id)
    return found


def ids(entries: Sequence[Any]) -> list[str]:
    return [entry.request_id for entry in entries]


def is_reported(router: Router, worker_id: str) -> bool:
    """Whether the last sample has a report of the worker."""
    sample = router.inner.watch.sampler.latest
    return sample is not None and any(
        tile.worker_id == worker_id and tile.HasField("sampled_unix_ms") for tile in sample.workers
    )

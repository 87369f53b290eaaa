"""One cluster for all tests that do not break it, one for those that do and mend it, and one of `trunkline serve`."""

from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from tests.cluster.harmed_fleet import HarmedFleet, SharingPair, harmed_fleet, sharing_pair
from tests.cluster.processes import Cluster, Served, running_cluster, running_serve
from tests.worker.engine_rig import DEMO_MODEL


@pytest.fixture(scope="package")
def cluster() -> Iterator[Cluster]:
    with running_cluster(DEMO_MODEL, "--dtype=float32", "--deterministic", "--kv-blocks=512") as running:
        yield running


@pytest.fixture(scope="session")
def served() -> Iterator[Served]:
    with running_serve(DEMO_MODEL) as running:
        yield running


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def standing_fleet() -> AsyncIterator[HarmedFleet]:
    async with harmed_fleet() as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="package")
async def standing_pair(standing_fleet: HarmedFleet) -> AsyncIterator[SharingPair]:
    await standing_fleet.make_whole()
    async with sharing_pair(standing_fleet.routed) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="package")
async def pair(fleet: HarmedFleet, standing_pair: SharingPair) -> SharingPair:
    await standing_pair.make_whole()
    return standing_pair


@pytest_asyncio.fixture(loop_scope="package")
async def fleet(standing_fleet: HarmedFleet) -> HarmedFleet:
    await standing_fleet.make_whole()
    return standing_fleet

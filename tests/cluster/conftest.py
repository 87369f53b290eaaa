"""One cluster for all tests that do not break it."""

from collections.abc import Iterator

import pytest

from tests.cluster.processes import Cluster, running_cluster
from tests.worker.engine_rig import DEMO_MODEL


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    with running_cluster(DEMO_MODEL, "--dtype=float32", "--deterministic", "--kv-blocks=512") as running:
        yield running

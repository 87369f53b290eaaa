"""A worker's state, as the page and the metrics tell it."""

import time

from tests.router.cluster import Cluster, cluster, until
from tests.router.fake_worker import FakeWorker
from trunkline.v1 import fleet_pb2
from trunkline_router.observe.metrics.worker_gauges import WorkerGauges
from trunkline_router.observe.watch.worker_tile import SHOWN, shown_state
from trunkline_router.workers.worker_link import ASIDE, CONNECTING, DRAINING, READY, STATES


def measured(router: Cluster) -> list[str]:
    """The states in which the metrics have the only worker."""
    first = next(iter(WorkerGauges(router.inference.pools, time.monotonic).families()))
    return [sample.labels["state"] for sample in first.samples if sample.value]


async def test_page_and_metrics_tell_the_same_state() -> None:
    assert SHOWN.keys() == set(STATES)
    worker = FakeWorker("a")
    async with cluster(worker) as router:
        (link,) = router.links
        assert measured(router) == [READY]
        assert shown_state(link, 0.0) == (fleet_pb2.WORKER_STATE_READY, "")
        router.connected(0).aside = "it has another vocabulary"
        assert measured(router) == [ASIDE]
        assert shown_state(link, 0.0) == (fleet_pb2.WORKER_STATE_BROKEN, "it has another vocabulary")
        worker.send_load(draining=True)
        await until(lambda: router.connected(0).load.draining)
        assert measured(router) == [DRAINING]
        assert shown_state(link, 0.0) == (fleet_pb2.WORKER_STATE_DRAINING, "")
        await worker.die()
        await until(lambda: link.worker is None)
        assert measured(router) == [CONNECTING]
        assert shown_state(link, 0.0) == (fleet_pb2.WORKER_STATE_CONNECTING, link.problem)

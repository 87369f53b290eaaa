"""Metrics of workers as the router sees them now, and of what has happened to them."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from itertools import islice

from prometheus_client.core import Metric

from trunkline_router.observe.metrics.attempt_metrics import MAX_WORKERS
from trunkline_router.observe.metrics.request_labels import MODEL
from trunkline_router.workers.connected_worker import ConnectedWorker
from trunkline_router.workers.pool import Pools
from trunkline_router.workers.worker_link import STATES, WorkerLink, state_of
from trunkline_runtime.telemetry.series import counter, gauge

WORKER = ("worker",)
KEPT_S = 86_400.0  # for how long a model without a worker is told of if no address is left that served it


class WorkerGauges:
    """Reads the links to workers at a scrape.  clock_s: the clock of links"""

    def __init__(self, pools: Pools, clock_s: Callable[[], float]) -> None:
        self._pools = pools
        self._clock_s = clock_s
        self._served_s: dict[str, float] = {}  # by model: when a worker last accepted requests for it

    def families(self) -> Iterable[Metric]:
        """All families."""
        links, now_s = self._links(), self._clock_s()
        yield gauge(
            "trunkline_router_worker_state",
            "1 if the process sees the worker in this state.",
            ("worker", "state"),
            [((name, state), state == state_of(link)) for name, link in links.items() for state in STATES],
        )
        totals = {name: link.totals.with_present(link.worker) for name, link in links.items()}
        for field, documentation in (
            ("connections", "Times that the router has connected to the worker."),
            ("losses", "Times that the connection was lost."),
            ("hangs", "Times that the worker had work and sent nothing for too long."),
            ("promised_tokens", "Prompt tokens that the index promised at the worker."),
            ("found_tokens", "Those of them that were in the worker's cache."),
        ):
            samples = [((name,), getattr(total, field)) for name, total in totals.items()]
            yield counter(f"trunkline_router_worker_{field}", documentation, WORKER, samples)
        yield counter(
            "trunkline_router_worker_breaker_openings",
            "Times that the worker's circuit breaker has opened.",
            WORKER,
            [((name,), link.breaker.times_opened) for name, link in links.items()],
        )
        connected = [(name, link.worker) for name, link in links.items() if link.worker is not None]
        for name, documentation, value_of in _of_connected(now_s):
            values = [((worker_name,), value_of(worker)) for worker_name, worker in connected]
            yield gauge(f"trunkline_router_worker_{name}", documentation, WORKER, values)
        yield gauge(
            "trunkline_router_pool_workers",
            "Workers that accept requests; 0 for a model that was served before.",
            MODEL,
            [((name,), number) for name, number in islice(self._pool_sizes(links, now_s), MAX_WORKERS)],
        )
        prices: dict[str, float] = defaultdict(float)
        for worker in (link.worker for link in self._pools.links):
            if worker is not None and worker.model.price_per_hour:
                prices[worker.model_name] += worker.model.price_per_hour
        yield gauge(
            "trunkline_router_fleet_price_per_hour",
            "What the connected workers cost, those that have a price.",
            MODEL,
            [((name,), price) for name, price in islice(prices.items(), MAX_WORKERS)],
        )

    def _links(self) -> Mapping[str, WorkerLink]:
        """By the label of the worker: its id or, while that is not known, its address."""
        links: dict[str, WorkerLink] = {}
        known = (link for link in self._pools.links if not link.is_on_trial and link.same_as is None)
        for link in sorted(islice(known, MAX_WORKERS), key=lambda link: link.worker is None):
            links.setdefault(link.address if link.model is None else link.model.worker_id, link)
        return links

    def _pool_sizes(self, links: Mapping[str, WorkerLink], now_s: float) -> Iterable[tuple[str, int]]:
        """Workers by model. A model that was served before is among them, so that an alert can tell that its last
        worker is gone. It is forgotten when none of the known addresses has served it and KEPT_S have passed."""
        accepting = self._pools.models()
        served = {*accepting, *(link.model.model for link in links.values() if link.model is not None)}
        self._served_s |= dict.fromkeys(served, now_s)
        self._served_s = {name: served_s for name, served_s in self._served_s.items() if now_s - served_s < KEPT_S}
        sizes = {name: len(pool.workers) for name, pool in accepting.items()}
        return (dict.fromkeys(self._served_s, 0) | sizes).items()


def _of_connected(now_s: float) -> Iterable[tuple[str, str, Callable[[ConnectedWorker], float]]]:
    return (
        ("index_accuracy", "Share of promised tokens found, of the last requests.", lambda w: w.accuracy.share),
        (
            "index_age_seconds",
            "Time since the worker's last message about its cache or load; 0 while it has no work.",
            lambda w: w.index_age_s(now_s),
        ),
        ("index_blocks", "KV blocks that the index knows at the worker.", lambda w: len(w.blocks)),
        (
            "routed_by_load",
            "1 if what the worker says of its cache does not count, because it is stale or was wrong.",
            lambda w: bool(w.distrust(now_s)),
        ),
        ("open_choices", "Choices of this router that have not ended there.", lambda w: w.open_choices),
        (
            "queued_tokens",
            "Uncached prompt tokens of this router's requests there that have no output yet.",
            lambda w: w.queued_tokens,
        ),
        (
            "unsent_messages",
            "Submits and aborts that wait to be written to the worker's session.",
            lambda w: w.session.num_unsent,
        ),
    )

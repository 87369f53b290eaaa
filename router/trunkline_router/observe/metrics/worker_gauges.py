"""Metrics of workers as the router sees them now, and of what has happened to them."""

from collections.abc import Callable, Iterable, Mapping
from itertools import islice

from prometheus_client.core import Metric

from trunkline_router.observe.metrics.attempt_metrics import MAX_WORKERS
from trunkline_router.workers.connected_worker import ConnectedWorker
from trunkline_router.workers.pool import Pools
from trunkline_router.workers.worker_link import STATES, WorkerLink, state_of
from trunkline_runtime.telemetry.exposition import counter, gauge

LABEL = ("worker",)
KEPT_S = 86_400.0  # for how long a model without a worker is told of if no address is left that served it


class WorkerGauges:
    """Reads the links to workers at a scrape.  clock_s: the clock of links"""

    def __init__(self, pools: Pools, clock_s: Callable[[], float]) -> None:
        self._pools = pools
        self._clock_s = clock_s
        self._served_s: dict[str, float] = {}  # by model: when a worker last accepted requests for it

    def families(self) -> Iterable[Metric]:
        """All families."""
        links = self._links()
        yield gauge(
            "trunkline_router_worker_state",
            "1 if the process sees the worker in this state.",
            ("worker", "state"),
            [((name, state), float(state == state_of(link))) for name, link in links.items() for state in STATES],
        )
        yield from self._totals(links)
        workers = [(name, link.worker) for name, link in links.items() if link.worker is not None]
        for name, documentation, value in self._of_connected():
            samples = [((worker_name,), value(worker)) for worker_name, worker in workers]
            yield gauge(f"trunkline_router_worker_{name}", documentation, LABEL, samples)
        yield from self._of_pools(links)

    def _links(self) -> Mapping[str, WorkerLink]:
        """By the label of the worker: its id or, while that is not known, its address."""
        links: dict[str, WorkerLink] = {}
        known = (link for link in self._pools.links if not link.is_on_trial and link.same_as is None)
        for link in sorted(islice(known, MAX_WORKERS), key=lambda link: link.worker is None):
            links.setdefault(link.address if link.model is None else link.model.worker_id, link)
        return links

    def _totals(self, links: Mapping[str, WorkerLink]) -> Iterable[Metric]:
        totals = {name: link.totals.with_present(link.worker) for name, link in links.items()}
        for name, documentation, field in (
            ("connections", "Times that the router has connected to the worker.", "connections"),
            ("losses", "Times that the connection was lost.", "losses"),
            ("hangs", "Times that the worker had work and sent nothing for too long.", "hangs"),
            ("promised_tokens", "Prompt tokens that the index promised at the worker.", "promised_tokens"),
            ("found_tokens", "Those of them that were in the worker's cache.", "found_tokens"),
        ):
            samples = [((worker,), float(getattr(total, field))) for worker, total in totals.items()]
            yield counter(f"trunkline_router_worker_{name}", documentation, LABEL, samples)
        yield counter(
            "trunkline_router_worker_breaker_openings",
            "Times that the worker's circuit breaker has opened.",
            LABEL,
            [((worker,), float(link.breaker.times_opened)) for worker, link in links.items()],
        )

    def _of_connected(self) -> Iterable[tuple[str, str, Callable[[ConnectedWorker], float]]]:
        now_s = self._clock_s()
        yield "index_accuracy", "Share of promised tokens found, of the last requests.", lambda w: w.accuracy.share
        yield (
            "index_age_seconds",
            "Time since the worker's last message about its cache or load; 0 while it has no work.",
            lambda w: w.index_age_s(now_s),
        )
        yield "index_blocks", "KV blocks that the index knows at the worker.", lambda w: float(len(w.blocks))
        yield (
            "routed_by_load",
            "1 if what the worker says of its cache does not count, because it is stale or was wrong.",
            lambda w: float(bool(w.distrust(now_s))),
        )
        yield "open_choices", "Choices of this router that have not ended there.", lambda w: float(w.open_choices)
        yield (
            "queued_tokens",
            "Uncached prompt tokens of this router's requests there that have no output yet.",
            lambda w: float(w.queued_tokens),
        )
        yield (
            "unsent_messages",
            "Submits and aborts that wait to be written to the worker's session.",
            lambda w: float(w.session.num_unsent),
        )

    def _of_pools(self, links: Mapping[str, WorkerLink]) -> Iterable[Metric]:
        accepting = self._pools.models()
        numbers = {name: float(len(pool.workers)) for name, pool in accepting.items()}
        for name in self._without_worker(accepting, links):
            numbers.setdefault(name, 0.0)
        yield gauge(
            "trunkline_router_pool_workers",
            "Workers that accept requests; 0 for a model that was served before.",
            ("model_name",),
            [((name,), number) for name, number in islice(numbers.items(), MAX_WORKERS)],
        )
        prices: dict[str, float] = {}
        for link in self._pools.links:
            if link.worker is not None and link.worker.model.price_per_hour:
                name = link.worker.model_name
                prices[name] = prices.get(name, 0.0) + link.worker.model.price_per_hour
        yield gauge(
            "trunkline_router_fleet_price_per_hour",
            "What the connected workers cost, those that have a price.",
            ("model_name",),
            [((name,), price) for name, price in islice(prices.items(), MAX_WORKERS)],
        )

    def _without_worker(self, accepting: Iterable[str], links: Mapping[str, WorkerLink]) -> Iterable[str]:
        """Models that were served before, so that an alert can tell that their last worker is gone. One is forgotten
        when none of the known addresses has served it and KEPT_S have passed."""
        now_s = self._clock_s()
        self._served_s |= dict.fromkeys(accepting, now_s)
        self._served_s |= {link.model.model: now_s for link in links.values() if link.model is not None}
        self._served_s = {name: served_s for name, served_s in self._served_s.items() if now_s - served_s < KEPT_S}
        return self._served_s

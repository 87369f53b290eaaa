"""This router's workers as the shared state sees them, with what other routers report of them."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence

from trunkline_router.quotas.stores.store import Lease, WorkerKey
from trunkline_router.routing.credit import NO_CREDIT, Credit
from trunkline_router.workers.connected_worker import ConnectedWorker
from trunkline_router.workers.pool import Pools


class PoolFleet:
    """A `Fleet` over the router's pools. A worker that connects later gets the next report of other routers."""

    def __init__(self, pools: Pools) -> None:
        self._pools = pools
        self._leased: frozenset[str] = frozenset()
        self._leases_changed = asyncio.Event()

    def credits(self) -> Mapping[WorkerKey, Credit]:
        told = ((key_of(worker), worker.credit()) for worker in self._connected())
        return {key: credit for key, credit in told if credit != NO_CREDIT}

    def leases(self) -> Sequence[Lease]:
        named = [(link, (link.same_as or link).worker) for link in self._pools.links if link.is_named]
        return [
            Lease(link.address, worker.model.worker_id, worker.model.epoch, worker.model.model)
            for link, worker in named
            if worker is not None and worker.accepts
        ]

    def take_credits(self, others: Mapping[WorkerKey, Credit]) -> None:
        for worker in self._connected():
            worker.take_foreign(others.get(key_of(worker), NO_CREDIT))

    def take_leases(self, leases: Sequence[Lease]) -> None:
        leased = frozenset(lease.address for lease in leases)
        if leased != self._leased:
            self._leased = leased
            self._leases_changed.set()

    async def leased(self) -> AsyncIterator[frozenset[str]]:
        """Yields the addresses of all workers that any router is connected to, whenever they change."""
        while True:
            await self._leases_changed.wait()
            self._leases_changed.clear()
            yield self._leased

    def _connected(self) -> list[ConnectedWorker]:
        return [link.worker for link in self._pools.links if link.worker is not None]


def key_of(worker: ConnectedWorker) -> WorkerKey:
    return WorkerKey(worker.model.worker_id, worker.model.epoch)

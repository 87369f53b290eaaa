"""This router's workers as the shared state sees them, and the other routers of the fleet as they last reported."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from heapq import nlargest

from trunkline_router.quotas.store import Lease, NeighbourReport, SyncReply, WorkerKey
from trunkline_router.routing.credit import NO_CREDIT, Credit
from trunkline_router.workers.connected_worker import ConnectedWorker
from trunkline_router.workers.pool import Pools

# Of all routers together: enough for 63 others with requests at 520 workers each. Each report is cut to an equal part.
MOST_CREDITS, MOST_TENANTS = 32_768, 8_192


class PoolFleet:
    """The workers of a router, as the shared state sees them. A worker that connects later gets the next report of
    other routers."""

    def __init__(self, pools: Pools) -> None:
        self._pools = pools
        self._leased: frozenset[str] = frozenset()
        self._leases_changed = asyncio.Event()

    def credits(self) -> Mapping[WorkerKey, Credit]:
        """Returns what this router has sent to each worker."""
        found = ((key_of(worker), worker.credit()) for worker in self._connected())
        return {key: credit for key, credit in found if credit != NO_CREDIT}

    def leases(self) -> Sequence[Lease]:
        """Returns the connected workers that the router knows from other sources than leases."""
        named = [(link, (link.same_as or link).worker) for link in self._pools.links if link.is_named]
        return [
            Lease(link.address, worker.model.worker_id, worker.model.epoch, worker.model.model)
            for link, worker in named
            if worker is not None and worker.accepts
        ]

    def take_credits(self, others: Mapping[WorkerKey, Credit]) -> None:
        """Takes what all other routers have sent to each worker; a worker that is missing was sent nothing."""
        for worker in self._connected():
            worker.take_foreign(others.get(key_of(worker), NO_CREDIT))

    def take_leases(self, leases: Sequence[Lease]) -> None:
        """Takes the workers that any router is connected to."""
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


class Neighbours:
    """The last reports of the other routers, and their sums."""

    def __init__(self) -> None:
        self._alive: frozenset[str] = frozenset()
        self._reports: dict[str, NeighbourReport] = {}
        self._sums: dict[WorkerKey, Credit] = {}  # of all reports; kept up to date, as few reports change at a time
        self.competing: frozenset[str] = frozenset()  # tenants with open requests at any of them

    def __len__(self) -> int:
        return len(self._alive)

    @property
    def versions(self) -> Mapping[str, int]:
        """Version of each router's last report."""
        return {name: report.version for name, report in self._reports.items()}

    def hear(self, reply: SyncReply) -> bool:
        """Takes a sync reply. Returns whether any report has changed."""
        self._alive = frozenset(reply.routers)
        gone = [name for name in self._reports if name not in self._alive]
        if not gone and not reply.changed:
            return False
        for name in gone:
            self._add(self._reports.pop(name), -1)
        for name, report in {**self._reports, **reply.changed}.items():  # with more routers, each has a smaller part
            before, kept = self._reports.get(name), self._bounded(report)
            if kept is before:
                continue
            if before is not None:
                self._add(before, -1)
            self._reports[name] = kept
            self._add(kept, 1)
        self.competing = frozenset(tenant for other in self._reports.values() for tenant in other.competing)
        return True

    def forget(self) -> None:
        self._alive, self._reports, self._sums, self.competing = frozenset(), {}, {}, frozenset()

    def credits(self) -> Mapping[WorkerKey, Credit]:
        """Returns what they have sent to each worker, together."""
        return dict(self._sums)

    def _add(self, report: NeighbourReport, times: int) -> None:
        for key, credit in report.credits.items():
            before = self._sums.get(key, NO_CREDIT)
            now = Credit(before.choices + times * credit.choices, before.tokens + times * credit.tokens)
            if now == NO_CREDIT:
                self._sums.pop(key, None)
            else:
                self._sums[key] = now

    def _bounded(self, report: NeighbourReport) -> NeighbourReport:
        """Cuts a report to its part: of credits, those with the most tokens are kept."""
        credits, competing, routers = report.credits, report.competing, max(1, len(self._alive))
        most_credits, most_tenants = MOST_CREDITS // routers, MOST_TENANTS // routers
        if len(credits) <= most_credits and len(competing) <= most_tenants:
            return report
        if len(credits) > most_credits:
            credits = dict(nlargest(most_credits, credits.items(), key=lambda item: item[1].tokens))
        return NeighbourReport(report.version, credits, competing[:most_tenants])

"""The other routers of the fleet, as they last reported."""

from collections.abc import Mapping, Sequence
from heapq import nlargest

from trunkline_router.quotas.stores.store import NeighbourReport, SyncReply, WorkerKey
from trunkline_router.routing.credit import NO_CREDIT, Credit

# Of all routers together: enough for 63 others with requests at 520 workers each. Beyond that, the largest reports are
# cut.
MOST_CREDITS, MOST_TENANTS = 32_768, 8_192


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
        for name, report in reply.changed.items():
            if name in self._reports:
                self._add(self._reports[name], -1)
            self._reports[name] = report
            self._add(report, 1)
        self._bound()
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

    def _bound(self) -> None:
        """Cuts the largest reports to a common size: of credits, those with the most tokens are kept."""
        most_credits = fair_part([len(report.credits) for report in self._reports.values()], MOST_CREDITS)
        most_tenants = fair_part([len(report.competing) for report in self._reports.values()], MOST_TENANTS)
        for name, report in list(self._reports.items()):
            credits, competing = report.credits, report.competing
            if len(credits) <= most_credits and len(competing) <= most_tenants:
                continue
            if len(credits) > most_credits:
                credits = dict(nlargest(most_credits, credits.items(), key=lambda item: item[1].tokens))
            kept = NeighbourReport(report.version, credits, competing[:most_tenants])
            self._add(report, -1)
            self._reports[name] = kept
            self._add(kept, 1)


def fair_part(sizes: Sequence[int], most: int) -> int:
    """Returns the max-min fair share: the largest size to which each part can be cut so that their sum is at most
    `most`. Smaller parts leave their rest to the others."""
    left = most
    for number, size in enumerate(sorted(sizes)):
        part = left // (len(sizes) - number)
        if size > part:
            return part
        left -= size
    return most

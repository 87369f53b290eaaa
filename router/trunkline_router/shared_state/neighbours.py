"""The other routers of the fleet, as they were heard last."""

from collections.abc import Mapping, Sequence
from heapq import nlargest

from trunkline_router.routing.credit import NO_CREDIT, Credit
from trunkline_router.stores.store import NeighbourReport, SyncReply, WorkerKey

# Of all routers together: 63 others that are busy at 520 workers each fit in. Where they come to more, those that say
# the most are heard in part.
MOST_CREDITS, MOST_TENANTS = 32_768, 8_192


class Neighbours:
    """See the module."""

    def __init__(self) -> None:
        self._alive: frozenset[str] = frozenset()
        self._said: dict[str, NeighbourReport] = {}
        self._sums: dict[WorkerKey, Credit] = {}  # of what they have said; kept, since few say something new at a time
        self.competing: frozenset[str] = frozenset()  # tenants with open requests at any of them

    def __len__(self) -> int:
        return len(self._alive)

    @property
    def versions(self) -> Mapping[str, int]:
        """Of what each has said."""
        return {name: said.version for name, said in self._said.items()}

    def hear(self, reply: SyncReply) -> bool:
        """Whether what they have said is different now."""
        self._alive = frozenset(reply.routers)
        gone = [name for name in self._said if name not in self._alive]
        if not gone and not reply.changed:
            return False
        for name in gone:
            self._add(self._said.pop(name), -1)
        for name, said in reply.changed.items():
            if name in self._said:
                self._add(self._said[name], -1)
            self._said[name] = said
            self._add(said, 1)
        self._bound()
        self.competing = frozenset(tenant for other in self._said.values() for tenant in other.competing)
        return True

    def forget(self) -> None:
        self._alive, self._said, self._sums, self.competing = frozenset(), {}, {}, frozenset()

    def credits(self) -> Mapping[WorkerKey, Credit]:
        """What they have sent where, together."""
        return dict(self._sums)

    def _add(self, said: NeighbourReport, times: int) -> None:
        for key, credit in said.credits.items():
            before = self._sums.get(key, NO_CREDIT)
            now = Credit(before.choices + times * credit.choices, before.tokens + times * credit.tokens)
            if now == NO_CREDIT:
                self._sums.pop(key, None)
            else:
                self._sums[key] = now

    def _bound(self) -> None:
        """Each router keeps as much as any other may: of its credits those with the most tokens."""
        most_credits = fair_part([len(said.credits) for said in self._said.values()], MOST_CREDITS)
        most_tenants = fair_part([len(said.competing) for said in self._said.values()], MOST_TENANTS)
        for name, said in list(self._said.items()):
            credits, competing = said.credits, said.competing
            if len(credits) <= most_credits and len(competing) <= most_tenants:
                continue
            if len(credits) > most_credits:
                credits = dict(nlargest(most_credits, credits.items(), key=lambda item: item[1].tokens))
            kept = NeighbourReport(said.version, credits, competing[:most_tenants])
            self._add(said, -1)
            self._said[name] = kept
            self._add(kept, 1)


def fair_part(sizes: Sequence[int], most: int) -> int:
    """The largest part that each may have so that all parts come to no more than `most`: whoever has less leaves the
    rest to the others."""
    left = most
    for number, size in enumerate(sorted(sizes)):
        part = left // (len(sizes) - number)
        if size > part:
            return part
        left -= size
    return most

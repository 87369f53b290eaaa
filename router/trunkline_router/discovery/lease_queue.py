"""Workers that are known by leases alone, and in which order they are tried.

Anybody who can write to Redis can lease addresses where no worker is. So an address is tried once and then set aside
for longer and longer, and no address waits for those that were leased after it. Pure: time is passed in.
"""

import heapq
from collections import OrderedDict
from collections.abc import Set
from dataclasses import dataclass
from math import inf

ASIDE_FIRST_S, ASIDE_MOST_S = 0.5, 60.0
RETRY_EVERY = 4
MOST_REMEMBERED = 4096  # addresses that were set aside or have served; those of the longest ago are forgotten


@dataclass(frozen=True, slots=True)
class _Aside:
    until_s: float
    pause_s: float
    holder: str  # the address by which the same worker is connected; "": there was no worker


class LeaseQueue:
    """Addresses in the order in which they are to be tried: those that have served before, then those that were never
    tried and every RETRY_EVERY times one whose pause is over, each kind first come first."""

    def __init__(self) -> None:
        self._leased: set[str] = set()  # and neither connected nor tried
        self._served: OrderedDict[str, None] = OrderedDict()
        self._again: dict[str, None] = {}  # they wait, and have served before
        self._new: dict[str, None] = {}  # they wait, and were never tried
        self._aside: OrderedDict[str, _Aside] = OrderedDict()
        self._due: list[tuple[float, str]] = []  # a heap; entries of an older pause are left in it
        self._tried = 0

    def __len__(self) -> int:
        """Those that wait for their first try, or for their next one after having served."""
        return len(self._again) + len(self._new)

    @property
    def num_aside(self) -> int:
        return len(self._aside)

    def lease(self, leased: Set[str]) -> None:
        """These are leased now, and the router has no link to them."""
        self._leased = set(leased)
        self._again = {address: None for address in self._again if address in leased}
        self._new = {address: None for address in self._new if address in leased}
        for address in sorted(leased - self._aside.keys() - self._again.keys() - self._new.keys()):
            (self._again if address in self._served else self._new)[address] = None

    def next(self, now_s: float) -> str | None:
        """Takes the one that is to be tried now out of the queue; None where none is."""
        address = self._first(now_s)
        if address is not None:
            self._leased.discard(address)
        return address

    def _first(self, now_s: float) -> str | None:
        if self._again:
            return _pop_first(self._again)
        self._tried += 1
        if self._new and self._tried % RETRY_EVERY:
            return _pop_first(self._new)
        if self.due_in_s(now_s) <= 0:
            return heapq.heappop(self._due)[1]
        return _pop_first(self._new) if self._new else None

    def due_in_s(self, now_s: float) -> float:
        """How long until a pause is over; infinite where none is under way."""
        while self._due:
            until_s, address = self._due[0]
            aside = self._aside.get(address)
            is_present = aside is not None and aside.until_s == until_s
            if is_present and (until_s > now_s or address in self._leased):
                return until_s - now_s
            heapq.heappop(self._due)
            if is_present:
                del self._aside[address]  # its lease has ended
        return inf

    def failed(self, address: str, now_s: float, holder: str = "") -> None:
        """There is no worker that could be connected, or one that is connected by another address, the holder's."""
        before = self._aside.pop(address, None)
        pause_s = ASIDE_FIRST_S if before is None else min(2 * before.pause_s, ASIDE_MOST_S)
        self._served.pop(address, None)
        self._aside[address] = _Aside(now_s + pause_s, pause_s, holder)
        heapq.heappush(self._due, (now_s + pause_s, address))
        if len(self._aside) > MOST_REMEMBERED:
            self._aside.popitem(last=False)

    def served(self, address: str) -> None:
        """A worker has been connected there for a while."""
        self._aside.pop(address, None)
        self._served[address] = None
        self._served.move_to_end(address)
        if len(self._served) > MOST_REMEMBERED:
            self._served.popitem(last=False)

    def lost(self, holder: str) -> None:
        """The connection with the worker at this address has ended: its other addresses are worth a try at once."""
        for address in [address for address, aside in self._aside.items() if aside.holder == holder]:
            del self._aside[address]
            if address in self._leased:
                self._again.setdefault(address)


def _pop_first(addresses: dict[str, None]) -> str:
    first = next(iter(addresses))
    del addresses[first]
    return first

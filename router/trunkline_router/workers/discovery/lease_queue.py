"""The order in which workers known from leases alone are tried. Pure: time is passed in.

Any program with access to Redis can lease addresses without a worker. So an address is tried once and then set aside
with exponential back-off, and no address waits for those that were leased after it.
"""

import heapq
from collections import OrderedDict
from collections.abc import Set
from dataclasses import dataclass
from math import inf

ASIDE_FIRST_S, ASIDE_MOST_S = 0.5, 60.0
RETRY_EVERY = 4
MOST_REMEMBERED = 4096  # addresses set aside, and addresses that have served; the oldest are forgotten


@dataclass(frozen=True, slots=True)
class _Aside:
    until_s: float
    pause_s: float
    holder: str  # the address at which the same worker is already connected; "" if there was no worker


class LeaseQueue:
    """Leased addresses in the order of their trials: those that have served before, then those that were never tried.
    Every RETRY_EVERY-th trial is of an address whose pause is over. Each kind is first in, first out."""

    def __init__(self) -> None:
        self._leased: set[str] = set()  # leased addresses without a link
        self._served: OrderedDict[str, None] = OrderedDict()
        self._again: dict[str, None] = {}  # waiting, have served before
        self._new: dict[str, None] = {}  # waiting, never tried
        self._aside: OrderedDict[str, _Aside] = OrderedDict()
        self._due: list[tuple[float, str]] = []  # a heap of (until_s, address), which may contain outdated entries
        self._tried = 0

    def __len__(self) -> int:
        """Number of addresses that wait for their first trial, or for the next one after having served."""
        return len(self._again) + len(self._new)

    @property
    def num_aside(self) -> int:
        """Number of addresses that are set aside."""
        return len(self._aside)

    def lease(self, leased: Set[str]) -> None:
        """Sets the leased addresses to which the router has no link."""
        self._leased = set(leased)
        self._again = {address: None for address in self._again if address in leased}
        self._new = {address: None for address in self._new if address in leased}
        for address in sorted(leased - self._aside.keys() - self._again.keys() - self._new.keys()):
            (self._again if address in self._served else self._new)[address] = None

    def next(self, now_s: float) -> str | None:
        """Removes and returns the address to try now, or None if there is none."""
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
        """Seconds until the next pause is over; infinite if no address is set aside."""
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
        """Sets the address aside because no worker could be connected there, or because the same worker is already
        connected at the address `holder`."""
        before = self._aside.pop(address, None)
        pause_s = ASIDE_FIRST_S if before is None else min(2 * before.pause_s, ASIDE_MOST_S)
        self._served.pop(address, None)
        self._aside[address] = _Aside(now_s + pause_s, pause_s, holder)
        heapq.heappush(self._due, (now_s + pause_s, address))
        if len(self._aside) > MOST_REMEMBERED:
            self._aside.popitem(last=False)

    def served(self, address: str) -> None:
        """Records that a worker was connected at the address for a while."""
        self._aside.pop(address, None)
        self._served[address] = None
        self._served.move_to_end(address)
        if len(self._served) > MOST_REMEMBERED:
            self._served.popitem(last=False)

    def lost(self, holder: str) -> None:
        """Records that the connection to the worker at `holder` has ended. Its other addresses may be tried at once."""
        for address in [address for address, aside in self._aside.items() if aside.holder == holder]:
            del self._aside[address]
            if address in self._leased:
                self._again.setdefault(address)


def _pop_first(addresses: dict[str, None]) -> str:
    first = next(iter(addresses))
    del addresses[first]
    return first

"""Which of a dead worker's requests may have killed it, and how that is found out.

Only requests in the steps under way can be the reason: the suspects. Each of them goes on at a worker where no other
suspect is (a cell), and where no new request goes either if it can go elsewhere, until it has survived a few steps. If
that engine dies too while everybody else in the step had shown to be harmless, the suspect is convicted. One that comes
under suspicion again keeps its cell for more steps.

All of that is the workers' own word, and two of them could lie. So only workers that are gone convict a request. By the
deaths of one worker the whole fleet refuses only so many requests of one tenant in an hour: see Witnesses. Beyond that,
this router alone refuses the request, for a minute: see quarantine.py.
"""

from collections import deque
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import TypeVar

from trunkline.protocol import CLEARING_STEPS

CLEARING_STEPS_AGAIN = 32  # of one that comes under suspicion again
# Requests of one tenant that a worker's deaths may convict in the whole fleet within WITNESS_S, which is also how long
# a conviction lasts. A worker that dies more often than that may be broken itself, or lie. Each tenant has its own
# count, so that one tenant's deadly prompts do not use up what protects the workers from another's.
MOST_CONVICTIONS, WITNESS_S = 8, 3600.0
MOST_WITNESSES = 4096  # pairs of a tenant and a worker that are remembered
GONE_WITHIN_S = 5.0  # a worker says that its engine has died, and then ends

Worker = TypeVar("Worker", bound=Hashable)


class Cells:
    """Which workers have a suspect of this router. `on_free` is called when one of them has none any more."""

    def __init__(self, on_free: Callable[[], None]) -> None:
        self._on_free = on_free
        self._taken: set[Hashable] = set()

    def is_free(self, worker: Hashable) -> bool:
        """Whether a suspect may go to this worker."""
        return worker not in self._taken

    def free_of(self, workers: Sequence[Worker]) -> Sequence[Worker]:
        """Of these workers those that have none."""
        return [worker for worker in workers if worker not in self._taken] if self._taken else workers

    def enter(self, worker: Hashable) -> "Cell":
        assert worker not in self._taken, "two suspects at one worker"
        self._taken.add(worker)
        return Cell(self, worker)

    def leave(self, worker: Hashable) -> None:
        self._taken.discard(worker)
        self._on_free()


class Cell:
    """A suspect's time at a worker. Ends are harmless when repeated."""

    def __init__(self, cells: Cells, worker: Hashable) -> None:
        self._cells = cells
        self._worker = worker
        self.is_held = True

    def leave(self) -> None:
        if self.is_held:
            self.is_held = False
            self._cells.leave(self._worker)


class Suspicion:
    """One request's history."""

    def __init__(self) -> None:
        self._deaths = 0
        self._cell: Cell | None = None
        self._was_isolated = False  # as its last attempt broke off
        self.is_suspect = False  # it must go to a worker without another suspect

    def enter(self, cell: Cell) -> None:
        self._cell = cell

    def leave(self) -> None:
        """Its attempt is over."""
        if self._cell is not None:
            self._cell.leave()

    def broke_off(self) -> None:
        """Its attempt is over, and why is looked at later."""
        self._was_isolated = self._cell is not None and self._cell.is_held
        self.leave()

    def on_progress(self, steps: int) -> None:
        """It has survived so many steps at the worker where it is now."""
        if self.is_suspect and steps >= (CLEARING_STEPS if self._deaths == 1 else CLEARING_STEPS_AGAIN):
            self.is_suspect = False
            self.leave()

    def on_death(self, *, sole_suspect: bool) -> bool:
        """It had broken off because an engine died in a step of it; whether that convicts it."""
        self._deaths += 1
        self.is_suspect = True
        return self._was_isolated and sole_suspect


class Witnesses:
    """Workers by whose deaths requests were convicted, by address: a worker that comes back is another process under
    the same one. Pure: time is passed in."""

    def __init__(self) -> None:
        # When, by tenant and address; the longest ago first.
        self._convicted_s: dict[tuple[str, str], deque[float]] = {}

    def believe(self, tenant: str, addresses: Collection[str], now_s: float) -> bool:
        """Whether the deaths of these workers convict a request of the tenant in the whole fleet. If so, it counts
        against each of them."""
        pairs = [(tenant, address) for address in addresses]
        for pair in pairs:
            times = self._convicted_s.get(pair)
            while times and times[0] <= now_s - WITNESS_S:
                times.popleft()
            if times is not None and len(times) >= MOST_CONVICTIONS:
                return False
        for pair in pairs:
            # Put behind the others, of which the first ones are forgotten.
            times = self._convicted_s.pop(pair, None) or deque()
            times.append(now_s)
            self._convicted_s[pair] = times
        while len(self._convicted_s) > MOST_WITNESSES:
            del self._convicted_s[next(iter(self._convicted_s))]
        return True

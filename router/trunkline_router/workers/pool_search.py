"""Searches for a worker before a request is refused for lack of one.

A worker that was absent at the router's last attempt may have started since, and another router may use it already.
"""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import inf

from trunkline_router.workers.connect_attempts import ANSWERED_AT_MOST_S, ConnectAttempts
from trunkline_router.workers.worker_link import WorkerLink

LOOK_AT_MOST_S = 1.0
APART_S = 0.2  # between two attempts that a search starts at one address, however many requests wait
# The same if only unknown models are searched for: a client can invent any name.
UNKNOWN_APART_S = 0.5
STEP_S = 0.005  # at most one attempt is started in this time
MOST_LOOKING = 1000  # requests that wait for a search, and are held in memory meanwhile
PATIENCE_SHARE = 0.5  # of the time left to a request, which needs the rest for an answer or another try


@dataclass(slots=True)
class _Look:
    """A search for one model, by all requests that asked for it within one step. Attempts that begin later count."""

    name: str
    is_known: bool
    begun_s: float = inf
    over: asyncio.Event = field(default_factory=asyncio.Event)


class PoolSearch:
    """Brings forward the attempts to connect to missing workers, and the lookups of names that stand for workers, while
    a request searches for one. Addresses are independent, and an address that a lookup adds counts at once.

    - A search lasts at most LOOK_AT_MOST_S, or ANSWERED_AT_MOST_S if a worker of the model has answered and is being
      connected, and at most half of the time left to the request. It ends sooner if every address has failed since it
      began, or has been silent for SILENT_AT_MOST_S in the present attempt.
    - An address that pauses is tried within APART_S plus one STEP_S for each missing address. Beyond about 150 missing
      addresses a search does not reach all of them.
    - All searches together start at most one attempt per STEP_S, and at one address one per APART_S, or one per
      UNKNOWN_APART_S if only unknown models are searched for. Without a search there is no cost.

    At most MOST_LOOKING requests search. A tenant's requests may take at most half of the places that others leave.
    """

    def __init__(
        self,
        links: Callable[[], Sequence[WorkerLink]],
        has: Callable[[str], bool],
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """`has`: whether the model has a ready worker; for an empty name, whether any model has."""
        self.lookups: list[ConnectAttempts] = []  # of names that stand for workers
        self._links = links
        self._has = has
        self._clock_s = clock_s
        self._known: set[str] = set()
        self._looking: Counter[str] = Counter()  # by tenant
        self._coming: dict[str, _Look] = {}  # by name: searches that begin with the next step
        self._looks: list[_Look] = []
        self._steps: asyncio.Task[None] | None = None

    def knows(self, name: str) -> bool:
        """Whether any worker has ever served the model."""
        return name in self._known or any(link.model is not None and link.model.model == name for link in self._links())

    def served(self, names: Iterable[str]) -> None:
        """Records that workers serve these models."""
        self._known.update(names)

    async def look_for(self, name: str, tenant: str, time_left_s: float | None = None) -> None:
        """Returns when a worker of the model (for an empty name, of any model) is found, or the search has failed."""
        if self._has(name) or not self._missing():
            return
        if self._looking[tenant] >= MOST_LOOKING - self._looking.total():
            return
        most_s = ANSWERED_AT_MOST_S
        if time_left_s is not None:
            most_s = min(most_s, time_left_s * PATIENCE_SHARE)
        self._looking[tenant] += 1
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(most_s):
                    await self._look(name).over.wait()
        finally:
            self._looking[tenant] -= 1
            if not self._looking[tenant]:
                del self._looking[tenant]

    def _look(self, name: str) -> _Look:
        """Returns the search for a name that begins with the next step."""
        if name not in self._coming:
            self._coming[name] = _Look(name, is_known=not name or self.knows(name))
        if self._steps is None or self._steps.done():
            self._steps = asyncio.create_task(self._run())
        return self._coming[name]

    async def _run(self) -> None:
        while self._coming or self._looks:
            self._step(self._clock_s())
            await asyncio.sleep(STEP_S)

    def _step(self, now_s: float) -> None:
        for look in self._coming.values():
            look.begun_s = now_s
        self._looks += self._coming.values()
        self._coming = {}
        missing = self._missing()
        self._end_looks(missing, now_s)
        if self._looks:
            self._hurry_one(missing, now_s)

    def _end_looks(self, missing: Sequence[ConnectAttempts], now_s: float) -> None:
        under_way = [attempts for attempts in missing if attempts.may_succeed(now_s)]
        connecting = {attempts.model for attempts in under_way if attempts.model is not None}
        # Addresses that have answered with another model are not waited for.
        awaited = [attempts for attempts in missing if attempts.is_paused]
        awaited += [attempts for attempts in under_way if attempts.model is None]
        all_tried_since_s = min((attempts.tried_s for attempts in awaited), default=inf)
        going_on = []
        for look in self._looks:
            is_connecting = look.name in connecting if look.name else bool(connecting)
            most_s = ANSWERED_AT_MOST_S if is_connecting else LOOK_AT_MOST_S
            in_vain = all_tried_since_s >= look.begun_s and not is_connecting
            if in_vain or now_s - look.begun_s >= most_s or self._has(look.name):
                look.over.set()
            else:
                going_on.append(look)
        self._looks = going_on

    def _hurry_one(self, missing: Sequence[ConnectAttempts], now_s: float) -> None:
        """Starts the attempt that is due and was tried longest ago."""
        apart_s = APART_S if any(look.is_known for look in self._looks) else UNKNOWN_APART_S
        before_s = min(now_s - apart_s, max(look.begun_s for look in self._looks))
        due = [attempts for attempts in missing if attempts.is_paused and attempts.begun_s <= before_s]
        if due:
            min(due, key=lambda attempts: attempts.begun_s).hurry()

    def _missing(self) -> list[ConnectAttempts]:
        """Returns the attempts that may bring a worker: lookups, and connections to workers that are missing."""
        missing = [
            link.connect_attempts
            for link in self._links()
            if link.worker is None and link.same_as is None and link.wanted
        ]
        return self.lookups + missing

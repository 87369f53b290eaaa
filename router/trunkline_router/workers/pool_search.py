"""Looks once more before a request is refused for want of a worker.

What a router found half a pause ago may have changed since, and another process of the same router, or another router,
may have seen that already.
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
APART_S = 0.2  # from one try to the next that a look begins at the same address, however many ask
# The same where only names are asked for that no worker ever had: anybody can think of one.
UNKNOWN_APART_S = 0.5
STEP_S = 0.005  # in which at most one try is begun
MOST_LOOKING = 1000  # requests; each is held in memory meanwhile
PATIENCE_SHARE = 0.5  # of the time left to a request: it is to be told that nobody is there, and to have time for more


@dataclass(slots=True)
class _Look:
    """For one name, by all who asked for it within one step. All attempts count that begin after it."""

    name: str
    is_known: bool
    begun_s: float = inf
    over: asyncio.Event = field(default_factory=asyncio.Event)


class PoolSearch:
    """Hurries attempts to connect to workers that are missing, and the lookups of names that stand for workers, while
    anybody looks for one. Each address for itself: none waits for another, and what a lookup adds counts at once.

    - Nobody looks for longer than LOOK_AT_MOST_S, or ANSWERED_AT_MOST_S where a worker of the model has answered and is
      being connected, or half of the time left to the request. A look is over sooner where each address has been tried
      in vain since it began, or has been silent for SILENT_AT_MOST_S in the try that is under way.
    - An address that is in its pause is tried within APART_S and one STEP_S for each that is missing, and while a look
      lasts it has whoever is there, whatever other addresses do. Past some 150 missing ones not every one of them has
      its turn within one look.
    - All looks together begin at most one try per STEP_S, and at an address one per APART_S; where only unknown names
      are looked for, one per UNKNOWN_APART_S. They cost a step each, and nothing where nobody looks.

    At most MOST_LOOKING requests look, and a tenant's only while no fewer places than it has are left to others.
    """

    def __init__(
        self,
        links: Callable[[], Sequence[WorkerLink]],
        has: Callable[[str], bool],
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """`has`: whether the model has a ready worker; of an empty name, whether any has."""
        self.lookups: list[ConnectAttempts] = []  # of names that stand for workers
        self._links = links
        self._has = has
        self._clock_s = clock_s
        self._known: set[str] = set()
        self._looking: Counter[str] = Counter()  # by tenant
        self._coming: dict[str, _Look] = {}  # by name: they begin with the next step
        self._looks: list[_Look] = []
        self._steps: asyncio.Task[None] | None = None

    def knows(self, name: str) -> bool:
        """Whether any worker has ever served it."""
        return name in self._known or any(link.model is not None and link.model.model == name for link in self._links())

    def served(self, names: Iterable[str]) -> None:
        """Workers serve these."""
        self._known.update(names)

    async def look_for(self, name: str, tenant: str, time_left_s: float | None = None) -> None:
        """Returns when a worker of the model has been found (of an empty name, any), or there seems to be none."""
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
        """One that has not begun."""
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
        under_way = [attempts for attempts in missing if attempts.may_come_to_something(now_s)]
        connecting = {attempts.model for attempts in under_way if attempts.model is not None}
        # What has answered with another model is not waited for.
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
        """The one that was tried longest ago, of those that it is time for."""
        apart_s = APART_S if any(look.is_known for look in self._looks) else UNKNOWN_APART_S
        before_s = min(now_s - apart_s, max(look.begun_s for look in self._looks))
        due = [attempts for attempts in missing if attempts.is_paused and attempts.begun_s <= before_s]
        if due:
            min(due, key=lambda attempts: attempts.begun_s).hurry()

    def _missing(self) -> list[ConnectAttempts]:
        """What may give rise to a worker that is not there: lookups, and connections to those who could have joined."""
        missing = [
            link.connect_attempts
            for link in self._links()
            if link.worker is None and link.same_as is None and link.wanted
        ]
        return self.lookups + missing

"""Searches for a worker before a request is refused for lack of one: a worker that was absent at the last attempt may
have started since, and another router may use it already.
"""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf

from trunkline.capabilities import NO_NEEDS, Needs

SILENT_AT_MOST_S = 1.0  # a worker that does not even refuse a connection in this time is taken for absent
ANSWERED_AT_MOST_S = 5.0  # a worker that has answered is present, but its tokenizer must be fetched and built
LOOK_AT_MOST_S = 1.0
APART_S = 0.2  # between two attempts that a search starts at one address, however many requests wait
STEP_S = 0.005  # at most one attempt is started in this time
MOST_LOOKING = 1000  # requests that wait for a search, and are held in memory meanwhile
PATIENCE_SHARE = 0.5  # of the time left to a request, which needs the rest for an answer or another try


class ConnectAttempts:
    """The attempts at one address or name, and the pauses between them."""

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self.is_paused = False  # no attempt is under way
        self.begun_s = clock_s()  # when the present attempt began, or else the last one
        self.tried_s = -inf  # when the latest attempt that is over began
        self.model: str | None = None  # that the present attempt has found there
        self._since_s = self.begun_s  # time of its last progress
        self._clock_s = clock_s
        self._hurry = asyncio.Event()

    def found(self, model: str | None) -> None:
        """A worker has answered that serves this model; None: its connection is lost, and another attempt will come."""
        self.model, self._since_s = model, self._clock_s()

    async def pause(self, pause_s: float) -> None:
        """An attempt is over. Returns when the next one should begin."""
        self.is_paused, self.model, self.tried_s = True, None, self.begun_s
        self._hurry.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await self._hurry.wait()
        self.is_paused = False
        self.begun_s = self._since_s = self._clock_s()

    def hurry(self) -> None:
        """Ends the pause."""
        self._hurry.set()

    def may_succeed(self, now_s: float) -> bool:
        """Whether an attempt is under way that has not been silent for too long, and so is worth waiting for."""
        patience_s = SILENT_AT_MOST_S if self.model is None else ANSWERED_AT_MOST_S
        return not self.is_paused and now_s - self._since_s < patience_s


@dataclass(slots=True)
class _Look:
    """A search for workers of one model that have some capabilities, by all requests that asked for them within one
    step. Attempts that begin later count."""

    name: str
    needs: Needs
    begun_s: float = inf
    over: asyncio.Event = field(default_factory=asyncio.Event)


class PoolSearch:
    """Brings forward the attempts to connect to missing workers, and the lookups of names that stand for workers, while
    a request searches for one. An address that a lookup adds counts at once.

    A search lasts at most LOOK_AT_MOST_S, or ANSWERED_AT_MOST_S if a worker of the model has answered and is being
    connected, and at most half of the time left to the request. It ends sooner if every address has failed since it
    began, or has been silent for SILENT_AT_MOST_S in the present attempt. All searches together start at most one
    attempt per STEP_S, and at one address one per APART_S, so they do not reach all of more than 150 missing addresses.

    At most MOST_LOOKING requests search. A tenant's requests may take at most half of the places that others leave.

    missing: returns the attempts that may bring a worker
    has: whether the model has a ready worker; for an empty name, whether any model has
    """

    def __init__(
        self,
        missing: Callable[[], Sequence[ConnectAttempts]],
        has: Callable[[str, Needs], bool],
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._missing = missing
        self._has = has
        self._clock_s = clock_s
        self._looking: Counter[str] = Counter()  # by tenant
        self._coming: dict[tuple[str, Needs], _Look] = {}  # searches that begin with the next step
        self._looks: list[_Look] = []
        self._steps: asyncio.Task[None] | None = None

    async def look_for(self, name: str, tenant: str, time_left_s: float | None = None, needs: Needs = NO_NEEDS) -> None:
        """Returns when a worker of the model (for an empty name, of any model) that has these capabilities is found, or
        the search has failed."""
        if self._has(name, needs) or not self._missing():
            return
        if self._looking[tenant] >= MOST_LOOKING - self._looking.total():
            return
        most_s = inf if time_left_s is None else time_left_s * PATIENCE_SHARE
        look = self._coming.setdefault((name, needs), _Look(name, needs))
        if self._steps is None or self._steps.done():
            self._steps = asyncio.create_task(self._run())
        self._looking[tenant] += 1
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(most_s, ANSWERED_AT_MOST_S)):
                    await look.over.wait()
        finally:
            self._looking[tenant] -= 1
            if not self._looking[tenant]:
                del self._looking[tenant]

    async def _run(self) -> None:
        while self._coming or self._looks:
            now_s = self._clock_s()
            for look in self._coming.values():
                look.begun_s = now_s
            self._looks += self._coming.values()
            self._coming = {}
            missing = self._missing()
            self._end_looks(missing, now_s)
            if self._looks:
                hurry_one(missing, min(now_s - APART_S, max(look.begun_s for look in self._looks)))
            await asyncio.sleep(STEP_S)

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
            if in_vain or now_s - look.begun_s >= most_s or self._has(look.name, look.needs):
                look.over.set()
            else:
                going_on.append(look)
        self._looks = going_on


def hurry_one(missing: Sequence[ConnectAttempts], before_s: float) -> None:
    """Starts the attempt that was tried longest ago, if that was before `before_s`."""
    due = [attempts for attempts in missing if attempts.is_paused and attempts.begun_s <= before_s]
    if due:
        min(due, key=lambda attempts: attempts.begun_s).hurry()

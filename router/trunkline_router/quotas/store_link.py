"""A store behind a circuit breaker. Requests wait a bounded time for it, and not at all while it does not answer."""

import asyncio
import math
from collections.abc import Awaitable, Callable
from random import Random
from typing import TYPE_CHECKING

from trunkline_router.quotas.quota import Quotas
from trunkline_router.quotas.store import Answer, Ask, StoreDown
from trunkline_runtime.log import get_logger

if TYPE_CHECKING:  # redis is loaded only if there is one
    from trunkline_router.quotas.redis_store import RedisStore

# A request's timeout is waited in slices, so that a delay of this process's own event loop counts as one slice at most.
# During such a delay the call may not have been sent yet, or its answer may be in the socket.
SLICES = 5

FAILURES_TO_OPEN = 3  # in a row: calls that time out together count as one failure
PROBE_S = 1.0  # at most between two probes; half of it at least


class Breaker:
    """A circuit breaker for a store that does not answer. Pure: time is passed in.

    It starts open. While closed, calls are made. While open, only background probes are made, about one a second.
    """

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._failures = 0
        self._probe_at_s = 0.0
        self._last_late_s = -math.inf
        self.is_open = True
        self.times_opened = 0

    def answered(self) -> None:
        """Records a call that was answered in time."""
        self._failures = 0

    def was_late(self, asked_s: float, now_s: float) -> bool:
        """Records a call that timed out. Returns whether this opened the breaker."""
        if asked_s < self._last_late_s:
            return False
        self._last_late_s = now_s
        self._failures += 1
        return self._failures >= FAILURES_TO_OPEN and self.broke(now_s)

    def broke(self, now_s: float) -> bool:
        """Opens the breaker at once because the connection is lost. Returns False if it was open already."""
        if self.is_open:
            return False
        self.is_open = True
        self.times_opened += 1
        self.probe_failed(now_s)
        return True

    def probe_in_s(self, now_s: float) -> float:
        """Seconds until a probe is due; 0 if it is due now."""
        return max(0.0, self._probe_at_s - now_s)

    def probe_failed(self, now_s: float) -> None:
        self._probe_at_s = now_s + PROBE_S * self._rng.uniform(0.5, 1.0)

    def probe_succeeded(self) -> None:
        """Closes the breaker."""
        self.is_open = False
        self._failures = 0


class StoreLink:
    """A router's access to the store. `name` is the router's name, and `policy` is how the log describes the quotas
    that apply without the store."""

    def __init__(
        self,
        store: "RedisStore",
        name: str,
        rng: Random,
        *,
        policy: str,
        patience_s: float,
        steady_s: Callable[[], float],
    ) -> None:
        self.store = store
        self.name = name
        self.life = ""  # the life of the store that has all state of this router; "" if there is none
        self.breaker = Breaker(rng)
        self._policy = policy
        self._patience_s = patience_s
        self._steady_s = steady_s
        self._last_problem = ""
        self._log = get_logger()
        self.has_lost_state = False  # it has answered so since the last sync
        self.entries = 0  # how often it was told everything: its earlier buckets no longer hold what it counted
        self.late_answers = 0
        self.syncs = 0  # successful ones

    @property
    def is_reachable(self) -> bool:
        return not self.breaker.is_open

    def ask(self, tenant: str, quotas: Quotas, tokens: int, in_flight_change: int) -> "asyncio.Future[Answer | None]":
        """Asks the store to count a request. Call it only while the store is reachable."""
        return self.store.reserve(Ask(self.name, self.life, tenant, quotas, tokens, in_flight_change))

    async def answer(self, asked: "asyncio.Future[Answer | None]") -> Answer | None:
        """The store's answer, or None if it does not arrive in time or the store has failed."""
        asked_s = self._steady_s()
        for _ in range(SLICES):
            await asyncio.wait((asked,), timeout=self._patience_s / SLICES)
            if asked.done():
                break
        if not asked.done():
            self.late_answers += 1
            if self.breaker.was_late(asked_s, self._steady_s()):
                self._log_lost("no answer in time")
            return None
        try:
            answer = asked.result()
        except StoreDown as error:
            self._lose(error)
            return None
        self.breaker.answered()
        self.has_lost_state |= answer is None
        return answer

    async def probe(self, exchange: Callable[[], Awaitable[None]]) -> None:
        """Tries to reconnect and to run `exchange`. If both succeed, the store is used again."""
        try:
            await self.store.connect()
            await exchange()
        except Exception as error:  # see _problem
            self.breaker.probe_failed(self._steady_s())
            self._log_lost(self._problem(error))
        else:
            self.breaker.probe_succeeded()
            if self._last_problem:
                self._log.info("shared state back")
                self._last_problem = ""

    async def use(self, exchange: Callable[[], Awaitable[None]]) -> None:
        """Runs `exchange` with a reachable store. Opens the breaker if it fails."""
        try:
            await exchange()
        except Exception as error:  # see _problem
            self._lose(error)

    def _lose(self, error: Exception) -> None:
        if self.breaker.broke(self._steady_s()):
            self._log_lost(self._problem(error))

    def _problem(self, error: Exception) -> str:
        """The error in one line. An unexpected error is treated as a lost store, because another router's data must
        not end this router. Its traceback is logged once."""
        if isinstance(error, StoreDown):
            return str(error)
        problem = f"unexpected {type(error).__name__}"
        if problem != self._last_problem:
            self._log.error("unexpected error", exc_info=error)
        return problem

    def _log_lost(self, problem: str) -> None:
        if not self._last_problem:  # one line per change, not per try
            self._log.warning("shared state lost", problem=problem, quotas=self._policy)
        self._last_problem = problem

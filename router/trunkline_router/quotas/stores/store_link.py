"""A store behind a circuit breaker. Requests wait a bounded time for it, and not at all while it does not answer."""

import asyncio
from collections.abc import Awaitable, Callable
from random import Random

from trunkline_router.quotas.quota import Quotas
from trunkline_router.quotas.stores.breaker import Breaker
from trunkline_router.quotas.stores.store import Answer, Ask, LifeEnded, Store, StoreDown
from trunkline_runtime.log import get_logger

PATIENCE_S = 0.005  # timeout on a request's path
# The timeout is waited in slices, so that a delay of this process's own event loop counts as one slice at most. During
# such a delay the call may not have been sent yet, or its answer may be in the socket.
SLICES = 5


class StoreLink:
    """A router's access to the store. `name` is the router's name, and `policy` is how the log describes the quotas
    that apply without the store."""

    def __init__(
        self, store: Store, name: str, rng: Random, *, policy: str, patience_s: float, steady_s: Callable[[], float]
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
        self.on_life_ended: Callable[[], None] = lambda: None
        self.late_answers = 0

    @property
    def is_reachable(self) -> bool:
        return not self.breaker.is_open

    def ask(
        self, tenant: str, quotas: Quotas, tokens: int, in_flight: int, refused: int | None
    ) -> "asyncio.Future[Answer]":
        """Asks the store to count a request. Call it only while the store is reachable."""
        return self.store.reserve(Ask(self.name, self.life, tenant, quotas, tokens, in_flight, refused))

    async def answer(self, asked: "asyncio.Future[Answer]") -> Answer | None:
        """The store's answer, or None if it does not arrive in time or the store has failed."""
        asked_s = self._steady_s()
        for _ in range(SLICES):
            if asked.done():
                break
            await asyncio.wait((asked,), timeout=self._patience_s / SLICES)
        if not asked.done():
            self.late_answers += 1
            if self.breaker.was_late(asked_s, self._steady_s()):
                self._log_lost("no answer in time")
            return None
        try:
            answer = asked.result()
        except LifeEnded:
            self.on_life_ended()
            return None
        except StoreDown as error:
            self._lose(error)
            return None
        self.breaker.answered()
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
            self.breaker.probe_succeeded(self._steady_s())
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

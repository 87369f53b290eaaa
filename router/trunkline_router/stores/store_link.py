"""A store behind a breaker: who asks waits a bounded time, and soon not at all where nobody answers."""

import asyncio
from collections.abc import Awaitable, Callable
from random import Random

from trunkline_router.quotas.quota import Quotas
from trunkline_router.stores.breaker import Breaker
from trunkline_router.stores.store import Answer, Ask, LifeEnded, Store, StoreDown
from trunkline_runtime.log import get_logger

PATIENCE_S = 0.005  # on a request's path
# Patience is spent in slices, each of which counts for no more than its length: while this process's own loop is busy
# the question may not have left yet, or the answer may lie in the socket, and the store is not to blame.
SLICES = 5


class StoreLink:
    """This router's end of the store. `name` is the router's, `policy` what the log says becomes of quotas."""

    def __init__(
        self, store: Store, name: str, rng: Random, *, policy: str, patience_s: float, steady_s: Callable[[], float]
    ) -> None:
        self.store = store
        self.name = name
        self.life = ""  # the store's, as far as it knows everything of this router; "": it does not
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
        """Has a request counted, while it is reachable."""
        return self.store.reserve(Ask(self.name, self.life, tenant, quotas, tokens, in_flight, refused))

    async def answer(self, asked: "asyncio.Future[Answer]") -> Answer | None:
        """What the store says; None where it does not say it in time."""
        asked_s = self._steady_s()
        for _ in range(SLICES):
            if asked.done():
                break
            await asyncio.wait((asked,), timeout=self._patience_s / SLICES)
        if not asked.done():
            self.late_answers += 1
            if self.breaker.was_late(asked_s, self._steady_s()):
                self._say_lost("no answer in time")
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
        """Tries whether the store is back, and everything is told: then it is asked again."""
        try:
            await self.store.connect()
            await exchange()
        except Exception as error:  # see _problem
            self.breaker.probe_failed(self._steady_s())
            self._say_lost(self._problem(error))
        else:
            self.breaker.probe_succeeded(self._steady_s())
            if self._last_problem:
                self._log.info("shared state back")
                self._last_problem = ""

    async def use(self, exchange: Callable[[], Awaitable[None]]) -> None:
        """Talks to the store that was there a moment ago."""
        try:
            await exchange()
        except Exception as error:  # see _problem
            self._lose(error)

    def _lose(self, error: Exception) -> None:
        if self.breaker.broke(self._steady_s()):
            self._say_lost(self._problem(error))

    def _problem(self, error: Exception) -> str:
        """In one line. What nobody foresaw is a store to do without too: a router can, and what came from another one
        must not end it. It is said once, with all that is known of it."""
        if isinstance(error, StoreDown):
            return str(error)
        problem = f"unexpected {type(error).__name__}"
        if problem != self._last_problem:
            self._log.error("unexpected error", exc_info=error)
        return problem

    def _say_lost(self, problem: str) -> None:
        if not self._last_problem:  # one line per change, not per try
            self._log.warning("shared state lost", problem=problem, quotas=self._policy)
        self._last_problem = problem

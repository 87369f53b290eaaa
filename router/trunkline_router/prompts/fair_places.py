"""A few places for long work, such as processes, shared fairly between accounts, with a bound on what waits."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Hashable
from typing import TypeVar

from trunkline.status import CODE_RESOURCE_EXHAUSTED, OVERLOADED, RequestRefused
from trunkline_router.prompts.fair_turns import Bounds, FairTurns, Job

RETRY_MS = 1000

Made = TypeVar("Made")


class FairPlaces:
    """Runs work at `places` places, of which one account holds at most `of_one`; fair_turns.py has the rules.

    slice_s: work that takes longer is slow, and may once be cancelled and run again from its beginning
    refusal: the message of a refusal where too much waits
    """

    def __init__(self, places: int, of_one: int, bounds: Bounds, *, slice_s: float, refusal: str) -> None:
        self._turns = FairTurns(places, of_one, bounds)
        self._slice_s = slice_s
        self._refusal = refusal
        self._begins: dict[Job, asyncio.Future[None]] = {}  # of jobs that wait
        self._ends: dict[Job, asyncio.Timeout] = {}  # of jobs that run

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits or runs."""
        return self._turns.is_idle

    async def run(
        self,
        account: Hashable,
        work: Callable[[Callable[[], None]], Awaitable[Made]],
        *,
        num_bytes: int,
        weight: float = 1.0,
    ) -> Made:
        """What `work` returns or raises. It is called with a function to call when its slice begins.

        Raises RequestRefused (OVERLOADED) where the account has too much here. Where all accounts together have too
        much, it is the account with the most that loses its last job.
        """
        job = self._turns.join(account, num_bytes, weight)
        if job is None:
            raise self._overloaded()
        self._begins[job] = begins = asyncio.get_running_loop().create_future()
        try:
            while (displaced := self._turns.displaced()) is not None:
                self._refuse(displaced)
            while True:
                self._settle()
                await begins
                try:
                    return await self._timed(job, work)
                except TimeoutError:
                    if not self._ends[job].expired():
                        raise
                self._begins[job] = begins = asyncio.get_running_loop().create_future()
                self._turns.wait_again(job, time.monotonic())
        finally:
            self._begins.pop(job, None)
            self._ends.pop(job, None)
            self._turns.end(job, time.monotonic())
            self._settle()

    async def _timed(self, job: Job, work: Callable[[Callable[[], None]], Awaitable[Made]]) -> Made:
        """Raises TimeoutError where the work gave way."""
        loop = asyncio.get_running_loop()
        slices: list[asyncio.TimerHandle] = []

        def begins() -> None:
            if not slices:
                slices.append(loop.call_later(self._slice_s, self._outlasts, job))

        try:
            async with asyncio.timeout(None) as self._ends[job]:
                return await work(begins)
        finally:
            for handle in slices:
                handle.cancel()

    def _refuse(self, job: Job) -> None:
        self._turns.end(job, time.monotonic())
        if not (begins := self._begins[job]).done():
            begins.set_exception(self._overloaded())
            begins.exception()  # nothing is lost where its caller is cancelled before it sees this

    def _overloaded(self) -> RequestRefused:
        return RequestRefused(CODE_RESOURCE_EXHAUSTED, OVERLOADED, self._refusal, retry_delay_ms=RETRY_MS)

    def _outlasts(self, job: Job) -> None:
        self._turns.outlasts(job)
        self._settle()

    def _settle(self) -> None:
        """Lets jobs begin, and one give way."""
        while (job := self._turns.next(time.monotonic())) is not None:
            if not (begins := self._begins[job]).done():  # else its caller has been cancelled, and ends it in a moment
                begins.set_result(None)
        if (recalled := self._turns.recalled()) is not None:
            self._ends[recalled].reschedule(asyncio.get_running_loop().time())

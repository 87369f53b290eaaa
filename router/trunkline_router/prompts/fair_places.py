"""A few places for long work, such as processes, which accounts share fairly, with a bound on the queue."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Hashable
from typing import TypeVar

from trunkline.status import CODE_RESOURCE_EXHAUSTED, OVERLOADED, RequestRefused
from trunkline_router.prompts.fair_turns import Bounds, FairTurns, Job

RETRY_MS = 1000

Result = TypeVar("Result")


class FairPlaces:
    """Runs work in `places` places, of which one account holds at most `of_one`. fair_turns.py has the rules.

    slice_s: work that takes longer is slow, and may be cancelled once and restarted from its beginning
    refusal: the message of a refusal when the queue is full
    """

    def __init__(self, places: int, of_one: int, bounds: Bounds, *, slice_s: float, refusal: str) -> None:
        self._turns = FairTurns(places, of_one, bounds)
        self._slice_s = slice_s
        self._refusal = refusal
        self._begins: dict[Job, asyncio.Future[None]] = {}  # of waiting jobs
        self._ends: dict[Job, asyncio.Timeout] = {}  # of running jobs

    @property
    def is_idle(self) -> bool:
        """Whether no job is waiting or running."""
        return self._turns.is_idle

    async def run(
        self,
        account: Hashable,
        work: Callable[[Callable[[], None]], Awaitable[Result]],
        *,
        num_bytes: int,
        weight: float = 1.0,
    ) -> Result:
        """Returns or raises what `work` does. `work` gets a function that it calls when its slice begins.

        Raises RequestRefused (OVERLOADED) if the account has too many jobs or bytes queued. If all accounts together
        have too many, the account with the most loses its newest waiting job.
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

    async def _timed(self, job: Job, work: Callable[[Callable[[], None]], Awaitable[Result]]) -> Result:
        """Raises TimeoutError if the work had to give way."""
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
            begins.exception()  # marks it as retrieved, because its caller may be cancelled before it sees this

    def _overloaded(self) -> RequestRefused:
        return RequestRefused(CODE_RESOURCE_EXHAUSTED, OVERLOADED, self._refusal, retry_delay_ms=RETRY_MS)

    def _outlasts(self, job: Job) -> None:
        self._turns.outlasts(job)
        self._settle()

    def _settle(self) -> None:
        """Starts the jobs whose turn it is, and makes one give way if one must."""
        while (job := self._turns.next(time.monotonic())) is not None:
            if not (begins := self._begins[job]).done():  # otherwise its caller was cancelled and ends it in a moment
                begins.set_result(None)
        if (recalled := self._turns.recalled()) is not None:
            self._ends[recalled].reschedule(asyncio.get_running_loop().time())

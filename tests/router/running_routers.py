"""Routers' ends of a Redis, in real time."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from random import Random

from tests.router.shared_state_rig import Convicting, FakeFleet, use
from trunkline.status import RequestRefused
from trunkline_router.quotas.admission import RequestUse
from trunkline_router.quotas.quota import Quotas
from trunkline_router.quotas.redis_store import RedisStore
from trunkline_router.quotas.reservation import Reservation


class RunningRouter(Convicting):
    """A router's end of a Redis, in real time."""

    def __init__(self, url: str, name: str, *, admits_when_down: bool = True) -> None:
        self.fleet = FakeFleet()
        store = RedisStore(url, "trunkline:")
        super().__init__(store, name, self.fleet, Random(0), admits_when_down=admits_when_down)

    async def admit(self, quotas: Quotas, prompt: int = 10, output: int | None = 10) -> Reservation:
        return await self.reserve("t", quotas, RequestUse(prompt, output, most_tokens=1000, choices=1), weight=1.0)

    async def admits(self, quotas: Quotas) -> bool:
        """Whether it does; the request has ended at once, all used."""
        try:
            use(await self.admit(quotas), 10, 10)
        except RequestRefused:
            return False
        return True


@contextlib.asynccontextmanager
async def running(url: str, *names: str, admits_when_down: bool = True) -> AsyncIterator[list[RunningRouter]]:
    routers = [RunningRouter(url, name, admits_when_down=admits_when_down) for name in names]
    for router in routers:
        await router.start()
    tasks = [asyncio.create_task(router.run()) for router in routers]
    try:
        yield routers
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for router in routers:
            await router.close()

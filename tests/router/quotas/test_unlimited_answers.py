"""Quotas hold for tenants that never say max_tokens: two routers, a real Redis, virtual time."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from random import Random

import pytest

from tests.parameters import one_in
from tests.router.shared_state_rig import Clock, Output, Router, use
from trunkline.status import RequestRefused
from trunkline_bench.servers.redis_server import RedisServer
from trunkline_router.quotas.quota import Quotas
from trunkline_router.quotas.redis_store import RedisStore
from trunkline_router.quotas.reservation import Reservation

TICK_S = 0.5  # 25 times a router's and more: what is generated between two looks is more
PACE = 25  # output tokens of a request in a tick
PROMPT = 20
CONTEXT = 8000
USERS = 40
COME_BACK_TICKS = 4
TOKENS_PER_MINUTE = 60_000
MINUTES = 3


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@dataclass
class User:
    """Sends one request after another through one router."""

    router: Router
    reservation: Reservation | None = None
    output: Output | None = None
    length: int = 0
    idle_ticks: int = 0


async def demand(redis: RedisServer, prefix: str, lengths: Callable[[], int]) -> list[int]:
    """Tokens that a tenant had, by tick, prompts as they were admitted and outputs as they were computed."""
    clock, had = Clock(), list[int]()
    stores = [RedisStore(redis.url, prefix, clock_ms=clock.now_ms) for _ in range(2)]
    routers = [Router(store, name, clock) for name, store in zip("ab", stores, strict=True)]
    for router in routers:
        await router.start()
    users = [User(routers[number % 2]) for number in range(USERS)]
    for _ in range(int(MINUTES * 60 / TICK_S)):
        clock.pass_s(TICK_S)
        had.append(0)
        for user in users:
            had[-1] += await advance(user, lengths)
        for router in routers:
            await router.sync.tick()
    assert not any(router.admission.reserves_alone for router in routers)
    for store in stores:
        await store.close()
    return had


async def advance(user: User, lengths: Callable[[], int]) -> int:
    """Tokens that it had in this tick."""
    if user.reservation is not None:
        assert user.output is not None
        computed = user.reservation.meter.tokens
        more = min(PACE, user.length - computed)
        user.output.comes_to(computed + more)
        if computed + more == user.length:
            use(user.reservation, PROMPT, user.length)
            user.reservation = None
        return more
    user.idle_ticks -= 1
    if user.idle_ticks > 0:
        return 0
    quotas = Quotas(tokens_per_minute=TOKENS_PER_MINUTE)
    try:
        user.reservation = await user.router.admit(quotas, PROMPT, None, most_tokens=CONTEXT)
    except RequestRefused:
        user.idle_ticks = COME_BACK_TICKS
        return 0
    user.output, user.length = Output(user.reservation), lengths()
    return PROMPT


def fullest_minute(had: list[int]) -> int:
    ticks = int(60 / TICK_S)
    sums = [0, *accumulate(had)]
    return max(sums[end] - sums[max(0, end - ticks)] for end in range(1, len(sums)))


LENGTHS: dict[str, Callable[[Random], int]] = {
    "equal": lambda draw: 150,
    "log-normal": lambda draw: min(CONTEXT, int(draw.lognormvariate(4.6, 1.0)) + 1),
    "many short, few long": lambda draw: 1200 if draw.random() < 0.1 else 12,
}


@pytest.mark.parametrize("kind", one_in(3, ["many short, few long", "equal", "log-normal"]))
async def test_a_tenant_far_over_its_quota_has_it_and_no_more(redis: RedisServer, kind: str) -> None:
    draw = Random(4)
    had = await demand(redis, f"lengths-{kind.replace(' ', '-')}", lambda: LENGTHS[kind](draw))
    assert fullest_minute(had) <= 1.02 * TOKENS_PER_MINUTE
    last_minute = sum(had[-int(60 / TICK_S) :])
    assert last_minute >= 0.85 * TOKENS_PER_MINUTE, "what running requests have reserved and not used is not had"

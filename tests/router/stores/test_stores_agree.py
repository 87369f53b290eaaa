"""Whatever is asked of them, in whatever order: Redis and the store in process say the same."""

from random import Random

import pytest

from tests.router.embedded_store import EmbeddedStore
from tests.router.shared_state_rig import Clock
from trunkline_bench.servers.redis_server import RedisServer
from trunkline_router.quotas.quota import Quotas
from trunkline_router.quotas.redis_store import RedisStore
from trunkline_router.quotas.store import Ask, Lease, Report, SyncReply, TenantReport, WindowChange, WorkerKey
from trunkline_router.routing.credit import Credit

ROUTERS, TENANTS = ("a", "b", "c"), ("t", "u")
WINDOW_MS = 12_000
STEPS = 250
SENT_MS = 100_000.0


def some_ask(draw: Random, life: str) -> Ask:
    def limit(most: int) -> int | None:
        return draw.choice((None, most // 4, most))

    quotas = Quotas(limit(20), limit(2000), limit(800))
    tokens, change = draw.randrange(1, 200), draw.choice((0, -100, 50))
    return Ask(draw.choice(ROUTERS), life, draw.choice(TENANTS), quotas, tokens, change)


def some_report(draw: Random, life: str, number: int) -> Report:
    def changes() -> list[WindowChange]:
        return [
            WindowChange(SENT_MS - draw.randrange(0, 15_000), draw.choice((-1, 0, 1)), draw.randrange(-100, 100))
            for _ in range(draw.randrange(3))
        ]

    some = [name for name in TENANTS if draw.random() < 0.5]
    credits = {WorkerKey(f"w{n}", n): Credit(n + 1, draw.randrange(500)) for n in range(draw.randrange(3))}
    leases = [Lease(f"h{n}:1", f"w{n}", draw.randrange(2), "m") for n in range(3) if draw.random() < 0.5]
    return Report(
        router=draw.choice(ROUTERS),
        life=life,
        number=number if draw.random() < 0.9 else max(1, number - 5),  # some come again
        sent_ms=SENT_MS,
        tenants={
            name: TenantReport(changes(), draw.choice((-50, 0, 50)), draw.choice((None, 0, 200))) for name in some
        },
        served={name: draw.uniform(0, 1000) for name in some},
        credits=draw.choice((None, credits)),
        competing=some,
        leases=draw.choice((None, leases)),
        convictions={draw.randbytes(4): draw.randrange(1, 20_000)} if draw.random() < 0.2 else {},
        known_leases=draw.choice((0, 3)),
        wants_served=draw.random() < 0.5,
    )


def comparable(reply: SyncReply) -> tuple[object, ...]:
    return (
        sorted(reply.routers),
        {name: (said.version, said.credits, list(said.competing)) for name, said in reply.changed.items()},
        None if reply.leases is None else sorted(reply.leases, key=lambda lease: lease.address),
        reply.leases_version,
        None if reply.convictions is None else dict(reply.convictions),
        reply.convictions_version,
    )


@pytest.mark.parametrize("seed", range(4))
async def test_both_stores_give_the_same_answers(redis_of_all: RedisServer, seed: int) -> None:
    clock, draw = Clock(), Random(seed)
    stores: list[RedisStore] = [
        EmbeddedStore(clock.now_ms, window_ms=WINDOW_MS),
        RedisStore(redis_of_all.url, f"agree-{seed}", window_ms=WINDOW_MS, clock_ms=clock.now_ms),
    ]
    for store in stores:
        await store.connect()
    try:
        lives = [(await store.sync(Report("a", "", 1))).life for store in stores]
        for step in range(STEPS):
            clock.ms += draw.choice((0, 1, 37, 450, 3001))
            state = draw.getstate()
            said: list[object] = []
            served: list[dict[str, float]] = []
            for store, life in zip(stores, lives, strict=True):
                draw.setstate(state)
                if draw.random() < 0.6:
                    said.append(await store.reserve(some_ask(draw, life)))
                else:
                    reply = await store.sync(some_report(draw, life, step + 2))
                    assert reply.life == life
                    said.append(comparable(reply))
                    served.append(dict(reply.served or {}))
            assert said[0] == said[1], f"step {step}"
            assert len(served) != 2 or served[0] == pytest.approx(served[1], rel=1e-3, abs=0.1), f"step {step}"
    finally:
        for store in stores:
            await store.close()

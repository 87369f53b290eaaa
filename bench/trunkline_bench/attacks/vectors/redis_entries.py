"""False entries that an attacker writes into a fleet's Redis, again and again, since routers remove those that they
recognise as false.

The entries have the form that routers write, in numbers or sizes that have done harm.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager

from redis.asyncio import Redis
from redis.exceptions import RedisError

PREFIX = "{trunkline}:1:"  # of a fleet with the default --key-prefix
AGAIN_S = 0.5  # between writes; entries of routers and leases expire after three seconds
LIFE_WAIT_S = 10.0  # for a router's first report
LEASES, ROUTERS, TALKATIVE_ROUTERS, CONVICTIONS = 3_000, 20_000, 20, 200_000
CREDITS_BYTES = 800_000
BATCH = 5_000  # entries in one command
TTL_MS, CONVICTION_MS = 3_000, 3_600_000

Attack = Callable[[str, float], Awaitable[None]]  # (URL of a Redis, seconds)
Strike = Callable[[Redis, str], Awaitable[None]]  # (client, prefix of the keys of the present life)


async def false_leases(redis_url: str, seconds: float) -> None:
    """3,000 leases of workers that do not exist."""
    await _again_and_again(redis_url, seconds, put_leases)


async def talkative_routers(redis_url: str, seconds: float) -> None:
    """20 routers, each with credits for tens of thousands of workers (800 KB)."""
    await _again_and_again(redis_url, seconds, put_talkative_routers)


async def false_routers(redis_url: str, seconds: float) -> None:
    """20,000 routers with a credit each."""
    await _again_and_again(redis_url, seconds, put_routers)


async def false_convictions(redis_url: str, seconds: float) -> None:
    """200,000 convictions of requests that do not exist."""
    await _again_and_again(redis_url, seconds, put_convictions)


async def wrong_types(redis_url: str, seconds: float) -> None:
    """Every key of the fleet, including those of two tenants, with a value of the wrong type."""
    await _again_and_again(redis_url, seconds, put_wrong_types)


ATTACKS: Mapping[str, Attack] = {
    "3,000 false leases": false_leases,
    "20 false routers with 800 KB of credits": talkative_routers,
    "20,000 false routers": false_routers,
    "200,000 convictions": false_convictions,
    "keys of the wrong type": wrong_types,
}


async def put_leases(client: Redis, keys: str, count: int = LEASES) -> None:
    """Leases for closed ports of this machine, and for addresses reserved for documentation (RFC 5737)."""
    until_ms = await _now_ms(client) + TTL_MS
    addresses = [
        f"127.0.0.1:{1 + number}" if number % 2 else f"192.0.2.{1 + number % 254}:{50_000 + number // 254}"
        for number in range(count)
    ]
    value = f"{until_ms}|" + json.dumps(["false", "1", "tiny"])
    await _fill(client, f"{keys}leases", dict.fromkeys(addresses, value))
    await client.hincrby(f"{keys}versions", "leases", 1)


async def put_routers(client: Redis, keys: str, count: int = ROUTERS, workers: int = 1, name: str = "false") -> None:
    """`count` routers with credits for `workers` workers each, under a version that no router has read."""
    now_ms = await _now_ms(client)
    names = [f"{name}-{number}/0" for number in range(count)]
    credits = [(f"worker-{number}", str(number), 5, 500) for number in range(workers)]
    said = f"{now_ms}|" + json.dumps([credits, ["a tenant"]])
    await _fill(client, f"{keys}routers", dict.fromkeys(names, f"{now_ms + TTL_MS}:1"))
    await _fill(client, f"{keys}credits", dict.fromkeys(names, said), batch=max(1, BATCH // workers))


async def put_talkative_routers(client: Redis, keys: str) -> None:
    bytes_each = len(json.dumps(("worker-10000", "10000", 5, 500))) + 2
    await put_routers(client, keys, TALKATIVE_ROUTERS, workers=CREDITS_BYTES // bytes_each, name="talkative")


async def put_convictions(client: Redis, keys: str, count: int = CONVICTIONS) -> None:
    until_ms = await _now_ms(client) + CONVICTION_MS
    for start in range(0, count, BATCH):
        numbers = range(start, min(count, start + BATCH))
        await client.zadd(f"{PREFIX}convictions", {f"{number:032x}": until_ms for number in numbers})
    await client.hincrby(f"{keys}versions", "convictions", 1)


async def put_wrong_types(client: Redis, keys: str) -> None:
    for name in ("routers", "credits", "versions", "leases", "served", "window:", "flight:", "window:innocent",
                 "flight:innocent"):  # fmt: skip
        await client.set(keys + name, "x")
    await client.delete(f"{PREFIX}convictions", f"{PREFIX}life")
    await client.rpush(f"{PREFIX}convictions", "x")
    await client.sadd(f"{PREFIX}life", "x")


async def _again_and_again(redis_url: str, seconds: float, strike: Strike) -> None:
    end_s = time.monotonic() + seconds
    async with _connected(redis_url) as client:
        while time.monotonic() < end_s:
            keys = await _keys(client)
            await strike(client, keys)
            await asyncio.sleep(min(AGAIN_S, max(0.0, end_s - time.monotonic())))


@asynccontextmanager
async def _connected(redis_url: str) -> AsyncIterator[Redis]:
    async with Redis.from_url(redis_url, decode_responses=True) as client:
        yield client


async def _keys(client: Redis) -> str:
    """Prefix of the keys of the present life. Raises TimeoutError if no router writes one in time."""
    async with asyncio.timeout(LIFE_WAIT_S):
        while True:
            try:
                if life := await client.get(f"{PREFIX}life"):
                    return f"{PREFIX}{str(life).partition('@')[0]}:"
            except RedisError:
                pass  # an attack has given the key another type, which a router will repair
            await asyncio.sleep(AGAIN_S / 10)


async def _now_ms(client: Redis) -> int:
    seconds, microseconds = await client.time()
    return int(seconds) * 1000 + int(microseconds) // 1000


async def _fill(client: Redis, key: str, entries: Mapping[str, str], batch: int = BATCH) -> None:
    """Adds entries to a hash, after removing a value of another type."""
    if await client.type(key) not in ("hash", "none"):
        await client.delete(key)
    items = list(entries.items())
    for start in range(0, len(items), batch):
        await client.hset(key, mapping=dict(items[start : start + batch]))

"""What a writer to a fleet's Redis may put there. Each attack writes again and again until its time is
over, since routers clear what they find out.

Entries have the form that routers write, in as large a number or size as was seen to do harm.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager

from redis.asyncio import Redis
from redis.exceptions import RedisError

PREFIX = "{trunkline}:1:"  # of a fleet with the default --key-prefix
AGAIN_S = 0.5  # entries of routers and leases last for three seconds
LIFE_WAIT_S = 10.0  # until a router has written its first report
LEASES, ROUTERS, TALKATIVE_ROUTERS, CONVICTIONS = 3_000, 20_000, 20, 200_000
CREDITS_BYTES = 800_000
BATCH = 5_000  # entries in one command
TTL_MS, CONVICTION_MS = 3_000, 3_600_000

Attack = Callable[[str, float], Awaitable[None]]  # with the URL of a Redis, for so many seconds
Strike = Callable[[Redis, str], Awaitable[None]]  # with what keys of the present life begin with


async def false_leases(redis_url: str, seconds: float) -> None:
    """3,000 leases of workers that are not there."""
    await _again_and_again(redis_url, seconds, put_leases)


async def talkative_routers(redis_url: str, seconds: float) -> None:
    """20 routers that each have sent something to tens of thousands of workers: 800 KB of credits."""
    await _again_and_again(redis_url, seconds, put_talkative_routers)


async def false_routers(redis_url: str, seconds: float) -> None:
    """20,000 routers with a credit each."""
    await _again_and_again(redis_url, seconds, put_routers)


async def false_convictions(redis_url: str, seconds: float) -> None:
    """200,000 convictions of requests that there are not."""
    await _again_and_again(redis_url, seconds, put_convictions)


async def wrong_types(redis_url: str, seconds: float) -> None:
    """Each key of the fleet, those of two tenants included, as one of another type."""
    await _again_and_again(redis_url, seconds, put_wrong_types)


ATTACKS: Mapping[str, Attack] = {
    "3,000 false leases": false_leases,
    "20 false routers with 800 KB of credits": talkative_routers,
    "20,000 false routers": false_routers,
    "200,000 convictions": false_convictions,
    "keys of the wrong type": wrong_types,
}


async def put_leases(client: Redis, keys: str, count: int = LEASES) -> None:
    """Ports of this machine without a listener, and addresses of networks that lead nowhere (RFC 5737)."""
    until_ms = await _now_ms(client) + TTL_MS
    addresses = [
        f"127.0.0.1:{1 + number}" if number % 2 else f"192.0.2.{1 + number % 254}:{50_000 + number // 254}"
        for number in range(count)
    ]
    value = f"{until_ms}|" + json.dumps(["false", "1", "tiny"])
    await _fill(client, f"{keys}leases", dict.fromkeys(addresses, value))
    await client.hincrby(f"{keys}versions", "leases", 1)


async def put_routers(client: Redis, keys: str, count: int = ROUTERS, workers: int = 1, name: str = "false") -> None:
    """Each with credits for so many workers, under a version that no router has read."""
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
    """What the keys of the present life begin with. Raises TimeoutError where no router comes."""
    async with asyncio.timeout(LIFE_WAIT_S):
        while True:
            try:
                if life := await client.get(f"{PREFIX}life"):
                    return f"{PREFIX}{str(life).partition('@')[0]}:"
            except RedisError:
                pass  # an attack has made another thing of it, which a router is about to mend
            await asyncio.sleep(AGAIN_S / 10)


async def _now_ms(client: Redis) -> int:
    seconds, microseconds = await client.time()
    return int(seconds) * 1000 + int(microseconds) // 1000


async def _fill(client: Redis, key: str, entries: Mapping[str, str], batch: int = BATCH) -> None:
    """A hash; one of another type is replaced."""
    if await client.type(key) not in ("hash", "none"):
        await client.delete(key)
    items = list(entries.items())
    for start in range(0, len(items), batch):
        await client.hset(key, mapping=dict(items[start : start + batch]))

"""Faults of a router's host: the reader of its log stalls, or a FIFO replaces its file of API keys."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path

from trunkline.client.client import Client
from trunkline.errors import TrunklineError
from trunkline_bench.attacks.innocent import Innocent, Record
from trunkline_bench.attacks.server import Server
from trunkline_bench.faults.fleet import FleetError
from trunkline_router.access.keys.key_file import changing
from trunkline_router.access.keys.new_key import new_key, new_record

BLOCKING_KEYS = "API keys replaced by a FIFO"
NUM_OTHERS = 4  # tenants that send requests besides, so that the router writes more than pipes and buffers take
FOLLOWED_S = 5.0  # a changed key counts within this time
AGAIN_S = 0.1

Outcomes = dict[str, int]
HostFault = Callable[[Server, Path, str], AbstractAsyncContextManager[Outcomes]]  # (router, key file, model)


@asynccontextmanager
async def unread_log(router: Server, _: Path, model: str) -> AsyncIterator[Outcomes]:
    """The reader of the router's log stalls, while other tenants send requests."""
    outcomes: Outcomes = {}
    records = [Record() for _ in range(NUM_OTHERS)]
    async with AsyncExitStack() as stack:
        router.stop_reading()
        tasks = []
        for number, record in enumerate(records):
            client = await stack.enter_async_context(Client(router.address, tenant=f"other-{number}", retries=0))
            tasks.append(asyncio.create_task(Innocent(client, "text", model=model).ask_while(lambda: True, record)))
        try:
            yield outcomes
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    outcomes["requests of others"] = sum(len(record.times_ms) for record in records)


@asynccontextmanager
async def blocking_keys(router: Server, keys: Path, model: str) -> AsyncIterator[Outcomes]:
    """A FIFO replaces the key file. Then the file is written again with a new key, which must be accepted within
    FOLLOWED_S, or FleetError is raised."""
    outcomes: Outcomes = {}
    os.unlink(keys)
    os.mkfifo(keys)
    yield outcomes
    os.unlink(keys)
    credential, changed_s = add_key(keys, "new"), time.monotonic()
    async with Client(router.address, api_key=credential, retries=0) as client:
        while not await _is_answered(client, model):
            if time.monotonic() - changed_s > FOLLOWED_S:
                raise FleetError(f"a new API key does not count after {FOLLOWED_S:g} s")
            await asyncio.sleep(AGAIN_S)
    outcomes["ms until a new key counted"] = round((time.monotonic() - changed_s) * 1e3)


def add_key(keys: Path, tenant: str) -> str:
    """Adds an API key to the file. Returns it as clients send it."""
    key = new_key()
    record = new_record(key, {"tenant": tenant}, time.time(), None)
    with changing(keys) as entries:
        entries[key.key_id] = {name: value for name, value in record.items() if name != "id"}
    return key.credential


async def _is_answered(client: Client, model: str) -> bool:
    try:
        await client.complete("Once", model=model, max_tokens=1)
    except TrunklineError:
        return False
    return True


HOST_FAULTS: Mapping[str, HostFault] = {
    "a reader of the log that stalls": unread_log,
    BLOCKING_KEYS: blocking_keys,
}

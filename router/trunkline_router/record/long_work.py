"""Bounds the time that an event loop spends on one request without a pause: work on long text is done in steps."""

import asyncio

STEP_BYTES = 256 << 10  # to copy, parse or decode this much takes a fraction of a millisecond


async def give_way(num_bytes: int) -> None:
    """Lets other tasks run, if the step before or after is on more than STEP_BYTES."""
    if num_bytes > STEP_BYTES:
        await asyncio.sleep(0)

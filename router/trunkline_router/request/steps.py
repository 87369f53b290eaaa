"""What an event loop does at once takes no longer than some milliseconds: after a step on much text, others have their
turn."""

import asyncio

STEP_BYTES = 256 << 10  # to copy, parse or decode so much takes a fraction of a millisecond


async def give_way(num_bytes: int) -> None:
    """To be awaited between two steps on so much."""
    if num_bytes > STEP_BYTES:
        await asyncio.sleep(0)

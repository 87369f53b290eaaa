"""Merges the answers to several prompts of one request."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import TypeVar

AT_ONCE = 32  # prompts of one request that are answered at the same time

Item = TypeVar("Item")


async def merged(
    answers: Sequence[Callable[[], AsyncGenerator[Item, None]]],
) -> AsyncGenerator[tuple[int, Item], None]:
    """Yields the items of all answers as they come, each with the index of its answer. At most AT_ONCE run at a time,
    and each waits until its item is taken. The first error ends them all, and is raised."""
    if len(answers) == 1:  # most requests: without tasks
        async with aclosing(answers[0]()) as items:
            async for item in items:
                yield 0, item
        return
    queue: asyncio.Queue[tuple[int, Item] | BaseException | None] = asyncio.Queue(maxsize=1)
    places = asyncio.Semaphore(AT_ONCE)
    door = asyncio.Lock()  # one begins in a round of the event loop: the first step of each may take a millisecond

    async def run(index: int) -> None:
        async with places:
            async with door:
                await asyncio.sleep(0)
            end: BaseException | None = None
            try:
                async with aclosing(answers[index]()) as items:
                    async for item in items:
                        await queue.put((index, item))
            except Exception as error:
                end = error
            await queue.put(end)  # in its place: after an error no other answer begins

    tasks = [asyncio.create_task(run(index)) for index in range(len(answers))]
    try:
        num_running = len(tasks)
        while num_running:
            event = await queue.get()
            if event is None:
                num_running -= 1
            elif isinstance(event, BaseException):
                raise event
            else:
                yield event
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

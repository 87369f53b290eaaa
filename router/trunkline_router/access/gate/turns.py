"""Decides when the event loop takes messages that have arrived: one account after another, and at a pace.

gRPC copies a message that has arrived on the event loop, at some five milliseconds per MiB, and HTTP bodies are parsed
there. So large messages are taken slowly enough for other work to run in between.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from contextlib import asynccontextmanager, suppress
from types import coroutine
from typing import Any, TypeVar
from weakref import WeakValueDictionary

LARGE_BYTES = 256 << 10  # a smaller message costs little more than its call
LOOP_BYTES_PER_S = 192 << 20  # what the event loop could copy
TAKEN_BYTES_PER_S = LOOP_BYTES_PER_S // 2  # what it copies and parses, so that half of its time is left
# Large messages of one account: a third of the loop's time, and many times what can be tokenized.
ACCOUNT_BYTES_PER_S = LOOP_BYTES_PER_S // 3
AT_ONCE_S = (1 << 20) / TAKEN_BYTES_PER_S  # how far the loop may be ahead of its pace; a single message may be larger
MAX_AHEAD_S = 0.1  # how far an account may be ahead of its pace
MAX_ACCOUNTS = 1024  # beyond this, accounts within their pace are forgotten

Result = TypeVar("Result")


class MessageTurns:
    """The turns of accounts. Of each account one message waits for the loop, and the others wait for that one."""

    def __init__(self) -> None:
        self._free_s = 0.0  # when the loop is done with what it took, at its pace
        self._free_of_account_s: dict[str, float] = {}  # the same of an account's large messages
        self._turn = asyncio.Lock()
        self._turns_of_accounts: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def turn(self, account: str) -> None:
        """Returns when the account's next message may be taken. The caller must call took() before it awaits again."""
        async with self.held(account):
            await self.step()

    @asynccontextmanager
    async def held(self, account: str) -> AsyncGenerator[None]:
        """The account's turn, held while one of its messages is taken and handled in steps. Messages and steps of other
        accounts come between two of them."""
        of_account = self._turns_of_accounts.setdefault(account, asyncio.Lock())
        async with of_account:
            await _reached(self._free_of_account_s.get(account, 0.0) - MAX_AHEAD_S)
            yield

    async def step(self) -> None:
        """Returns when the loop may take a step on the message of an account that has its turn. The caller must call
        took() before it awaits again."""
        async with self._turn:
            await _reached(self._free_s - AT_ONCE_S)

    def took(self, account: str, num_bytes: int, *, in_all: int = 0) -> None:
        """Records that a message of `num_bytes` was taken, or something that took the loop as long.

        in_all: the bytes of all steps on a message so far
        """
        now_s = asyncio.get_running_loop().time()
        self._free_s = max(now_s, self._free_s) + num_bytes / TAKEN_BYTES_PER_S
        free_s = self._free_of_account_s
        if max(num_bytes, in_all) > LARGE_BYTES:
            if len(free_s) >= MAX_ACCOUNTS:
                free_s = self._free_of_account_s = {each: at_s for each, at_s in free_s.items() if at_s > now_s}
            free_s[account] = max(now_s, free_s.get(account, 0.0)) + num_bytes / ACCOUNT_BYTES_PER_S


async def _reached(at_s: float) -> None:
    """Returns at this time of the event loop's clock, at once if it is over."""
    wait_s = at_s - asyncio.get_running_loop().time()
    if wait_s > 0.0:
        await asyncio.sleep(wait_s)


@coroutine
def taken_in_turn(
    reading: Coroutine[Any, Any, Result], turn: Callable[[], Coroutine[Any, Any, None]]
) -> Generator[Any, Any, Result]:
    """Runs `reading`, a coroutine that awaits the arrival of a message and then copies its bytes, and awaits `turn`
    between these two steps. Returns or raises what `reading` does."""
    steps = reading.__await__()
    try:
        arrival = next(steps)
    except StopIteration as ended:
        result: Result = ended.value  # it did not have to wait
        return result
    try:
        yield arrival
        yield from turn().__await__()
    except BaseException as error:  # a cancellation or a refusal: either ends the reading
        with suppress(type(error)):
            steps.throw(error)
        raise
    return (yield from steps)

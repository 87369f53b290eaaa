"""Limits how many message bytes are read in one turn of the event loop, and per account in one second.

gRPC copies a message into a bytes object when the reading call resumes, at some five milliseconds per MiB. All messages
that arrived in one turn would be copied in the next turn and parsed in the one after it, and nothing else could run in
between. So calls resume one at a time, until they have read TURN_BYTES in a turn. gRPC also accepts only one call per
turn: an account that keeps sending large messages would make all turns long, so each account has a rate limit.
"""

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Coroutine, Generator
from contextlib import suppress
from types import coroutine
from typing import Any, TypeVar

TURN_BYTES = 1 << 20  # a single message may be larger
LARGE_BYTES = 256 << 10  # a smaller message costs little more than its call
LOOP_BYTES_PER_S = 192 << 20  # what the event loop could read
# Large messages of one account: a third of the loop's time, and many times what can be tokenized.
ACCOUNT_BYTES_PER_S = LOOP_BYTES_PER_S // 3
MAX_AHEAD_S = 0.1  # how far an account may be ahead of its rate
MAX_ACCOUNTS = 1024  # beyond this, accounts within their rate are forgotten

Result = TypeVar("Result")


class MessageTurns:
    """Decides when the calls of one event loop resume with messages that have arrived."""

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._read_bytes = 0  # in this turn of the loop
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()  # by account, the next one first
        self._within_rate_at_s: dict[str, float] = {}  # when an account is back within its rate
        self._next: asyncio.Handle | None = None  # begins the next turn
        self._is_delayed = False  # it begins only when an account is within its rate
        self._resuming: asyncio.Future[None] | None = None  # of the call that was woken, until it runs

    async def turn(self, account: str) -> None:
        """Returns when the account's next message may be read. The caller must then call `took`."""
        is_free = self._resuming is None and not self._waiting and self._read_bytes < TURN_BYTES
        if is_free and self._ahead_s(account) <= MAX_AHEAD_S:
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(account, deque()).append(turn)
        self._schedule(0.0)
        try:
            await turn
        except asyncio.CancelledError:
            self._forget(account, turn)
            raise
        finally:
            if self._resuming is turn:
                self._resuming = None

    def took(self, account: str, num_bytes: int) -> None:
        """Records that a message of `num_bytes` was read; 0 if reading it failed."""
        self._read_bytes += num_bytes
        if num_bytes > LARGE_BYTES:
            now_s, due_s = self._clock_s(), self._within_rate_at_s
            if len(due_s) >= MAX_ACCOUNTS:
                due_s = self._within_rate_at_s = {each: at_s for each, at_s in due_s.items() if at_s > now_s}
            due_s[account] = max(now_s, due_s.get(account, 0.0)) + num_bytes / ACCOUNT_BYTES_PER_S
            if self._next is not None:  # it was to begin in this turn of the loop
                self._next.cancel()
                self._next = None
        if self._read_bytes or self._waiting:
            self._schedule(0.0)
        if self._read_bytes < TURN_BYTES:
            self._wake()

    def _ahead_s(self, account: str) -> float:
        """How far the account is ahead of its rate."""
        return self._within_rate_at_s.get(account, 0.0) - self._clock_s()

    def _schedule(self, in_s: float) -> None:
        if self._next is None:
            loop = asyncio.get_running_loop()
            self._is_delayed = in_s > 0
            self._next = loop.call_later(in_s, self._begin) if in_s > 0 else loop.call_soon(self._begin)
        elif in_s <= 0 and self._is_delayed:
            self._next.cancel()
            self._next = None
            self._schedule(0.0)

    def _begin(self) -> None:
        self._next, self._read_bytes = None, 0
        self._wake()
        if self._waiting:
            self._schedule(min(map(self._ahead_s, self._waiting)) - MAX_AHEAD_S)

    def _wake(self) -> None:
        """Wakes the first waiting call of the next account that is within its rate, if there is one."""
        if self._resuming is not None:
            return
        while (account := self._first()) is not None:
            turns = self._waiting.pop(account)
            turn = turns.popleft()
            if turns:
                self._waiting[account] = turns  # behind the others
            if not turn.done():  # its call is not cancelled
                turn.set_result(None)
                self._resuming = turn
                return

    def _first(self) -> str | None:
        """The account whose turn it is, or None if all are ahead of their rates."""
        return next((account for account in self._waiting if self._ahead_s(account) <= MAX_AHEAD_S), None)

    def _forget(self, account: str, turn: "asyncio.Future[None]") -> None:
        turns = self._waiting.get(account, deque())
        if turn in turns:
            turns.remove(turn)
        if not turns:
            self._waiting.pop(account, None)


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

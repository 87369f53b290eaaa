"""How much of what clients send is handed on: in one turn of the event loop, and of one account in a second.

gRPC makes a message's bytes when the call that reads it goes on, at some five milliseconds a MiB. Messages that came
in one turn would be copied together in the next one, and parsed in the one after it, with nothing else in between.
So calls go on one after the other, in each turn until they have taken TURN_BYTES. gRPC also accepts one call a turn:
an account that sends large messages without end would keep turns long and others waiting, so it has its pace.
"""

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Coroutine, Generator
from contextlib import suppress
from types import coroutine
from typing import Any, TypeVar

TURN_BYTES = 1 << 20  # a single message may be larger
LARGE_BYTES = 256 << 10  # a message of fewer costs little more than its call
# Of large messages of one account. It is a third of what the event loop could take, and many times what is tokenized.
ACCOUNT_BYTES_PER_S = 64 << 20
MOST_OWED_S = 0.1  # that an account may be ahead of its pace
MOST_REMEMBERED = 1024  # accounts, before those that owe nothing are forgotten

Made = TypeVar("Made")


class MessageTurns:
    """Lets the calls of one event loop go on with messages that have arrived."""

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._taken = 0  # bytes in this turn of the loop
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()  # by account, the next one first
        self._paid_s: dict[str, float] = {}  # when an account's large messages are within its pace
        self._next: asyncio.Handle | None = None  # begins the next turn
        self._going: asyncio.Future[None] | None = None  # the call that was told to go on, until it does

    async def turn(self, account: str) -> None:
        """Returns when the account's next message may go on. Call `took` then."""
        is_free = self._going is None and not self._waiting and self._taken < TURN_BYTES
        if is_free and self._owed_s(account) <= MOST_OWED_S:
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
            if self._going is turn:
                self._going = None

    def took(self, account: str, num_bytes: int) -> None:
        """A message of so many bytes has gone on, or does not any more (0)."""
        self._taken += num_bytes
        if num_bytes > LARGE_BYTES:
            now_s = self._clock_s()
            if len(self._paid_s) >= MOST_REMEMBERED:
                self._paid_s = {each: paid_s for each, paid_s in self._paid_s.items() if paid_s > now_s}
            self._paid_s[account] = max(now_s, self._paid_s.get(account, 0.0)) + num_bytes / ACCOUNT_BYTES_PER_S
            if self._next is not None:  # it was to begin in this turn of the loop
                self._next.cancel()
                self._next = None
        if self._taken or self._waiting:
            self._schedule(0.0)
        if self._taken < TURN_BYTES:
            self._wake()

    def _owed_s(self, account: str) -> float:
        """How far the account is ahead of its pace."""
        return self._paid_s.get(account, 0.0) - self._clock_s()

    def _schedule(self, in_s: float) -> None:
        if self._next is None:
            loop = asyncio.get_running_loop()
            self._next = loop.call_later(in_s, self._begin) if in_s > 0 else loop.call_soon(self._begin)
        elif in_s <= 0 and isinstance(self._next, asyncio.TimerHandle):
            self._next.cancel()
            self._next = None
            self._schedule(0.0)

    def _begin(self) -> None:
        self._next, self._taken = None, 0
        self._wake()
        if self._waiting:
            self._schedule(min(map(self._owed_s, self._waiting)) - MOST_OWED_S)

    def _wake(self) -> None:
        """Lets the first call of the next account within its pace go on, if there is one."""
        if self._going is not None:
            return
        while (account := self._first()) is not None:
            turns = self._waiting.pop(account)
            turn = turns.popleft()
            if turns:
                self._waiting[account] = turns  # behind the others
            if not turn.done():  # its call is not cancelled
                turn.set_result(None)
                self._going = turn
                return

    def _first(self) -> str | None:
        """The account whose turn it is."""
        return next((account for account in self._waiting if self._owed_s(account) <= MOST_OWED_S), None)

    def _forget(self, account: str, turn: "asyncio.Future[None]") -> None:
        turns = self._waiting.get(account, deque())
        if turn in turns:
            turns.remove(turn)
        if not turns:
            self._waiting.pop(account, None)


@coroutine
def taken_in_turn(
    reading: Coroutine[Any, Any, Made], turn: Callable[[], Coroutine[Any, Any, None]]
) -> Generator[Any, Any, Made]:
    """What `reading` returns or raises: a coroutine that awaits the arrival of a message and then makes its bytes.
    Between the two this awaits `turn`."""
    steps = reading.__await__()
    try:
        arrival = next(steps)
    except StopIteration as ended:
        result: Made = ended.value  # it did not have to wait
        return result
    try:
        yield arrival
        yield from turn().__await__()
    except BaseException as error:  # a cancellation, which ends the reading, or a refusal
        with suppress(type(error)):
            steps.throw(error)
        raise
    return (yield from steps)

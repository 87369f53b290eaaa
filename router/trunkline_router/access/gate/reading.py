"""Decides which calls may have their messages read now, and when the event loop copies and parses a message.

A call whose message has not been read costs little: the stream's flow-control window bounds what its client has sent.
A message being read takes memory as it arrives, and its size is not known in advance. So only some calls are read at
once (Reading). gRPC copies a message that has arrived on the event loop, at some five milliseconds per MiB, and HTTP
bodies are parsed there. So messages are taken at a pace, a tenant's more slowly than all together (MessageTurns).
"""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Coroutine, Generator, Iterator
from contextlib import suppress
from itertools import islice
from types import coroutine
from typing import Any, Generic, TypeVar

from trunkline.status import CODE_RESOURCE_EXHAUSTED, OVERLOADED, RequestRefused, invalid
from trunkline_router.access.gate.places import RETRY_MS, Bounds, GiveUp, Place, Places, Sender

MESSAGE_TIMEOUT_S = 30.0  # until a message has arrived, and until its reading begins: the largest at 2 Mbit/s
LONG_S = 1.0  # a message that takes longer may be given up for a sender with fewer
CHECK_S = 0.25  # between two looks at what takes long
MAX_TRIED = 64  # names in a queue that are considered at once; the others follow

# Messages being read at once, each of at most request_size.MAX_REQUEST_BYTES.
READ_BOUNDS = Bounds(in_all=96, of_host=80, of_connection=48, of_tenant=32, spare=24)

LARGE_BYTES = 256 << 10  # a smaller message costs little more than its call
LOOP_BYTES_PER_S = 192 << 20  # what the event loop could copy
TAKEN_BYTES_PER_S = LOOP_BYTES_PER_S // 2  # what it copies and parses, so that half of its time is left
# Large messages of one account: a third of the loop's time, and many times what can be tokenized.
ACCOUNT_BYTES_PER_S = LOOP_BYTES_PER_S // 3
BURST_BYTES = 1 << 20  # taken at once; a single message may be larger
MAX_AHEAD_S = 0.1  # how far an account may be ahead of its rate
RETRY_S = 0.005  # if every account that waits is ahead of its rate
MAX_ACCOUNTS = 1024  # beyond this, accounts within their rate are forgotten

Name = TypeVar("Name")
Item = TypeVar("Item")
Result = TypeVar("Result")


class FairQueue(Generic[Name, Item]):
    """Items by name. The names take turns."""

    def __init__(self) -> None:
        self._items: OrderedDict[Name, deque[Item]] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._items)

    def __iter__(self) -> Iterator[Item]:
        return (item for items in self._items.values() for item in items)

    def next_names(self, most: int) -> list[Name]:
        """At most so many names, the next one first."""
        return list(islice(self._items, most))

    def add(self, name: Name, item: Item) -> None:
        self._items.setdefault(name, deque()).append(item)

    def first(self, name: Name) -> Item:
        """The name's next item."""
        return self._items[name][0]

    def remove(self, name: Name, item: Item) -> None:
        """Removes the item. Does nothing if it is not queued."""
        items = self._items.get(name)
        if items is not None and item in items:
            items.remove(item)
            if not items:
                del self._items[name]

    def pass_turn(self, name: Name) -> None:
        """Puts the name behind the others, if it has items."""
        if name in self._items:
            self._items.move_to_end(name)


class Reading:
    """Places for messages being read. Senders that wait for a place take turns."""

    def __init__(self, bounds: Bounds = READ_BOUNDS) -> None:
        self._places = Places(bounds, "messages being read")
        self._since_s: dict[Place, float] = {}  # of messages that have not arrived, the oldest first
        self._waiting: FairQueue[Sender, _Waiting] = FairQueue()
        self._check_timer: asyncio.TimerHandle | None = None

    @property
    def num_read(self) -> int:
        """Messages being read."""
        return self._places.num_held

    @property
    def num_waiting(self) -> int:
        """Calls that wait for a place."""
        return sum(1 for _ in self._waiting)

    async def begin(self, sender: Sender, give_up: GiveUp) -> Place:
        """Returns a place; end() must follow. A call whose message takes too long is given up. Raises RequestRefused
        if there is no place for a long time."""
        try:
            place = self._places.take(sender, give_up)
        except RequestRefused:
            place = await self._turn(sender, give_up)
        self._since_s[place] = asyncio.get_running_loop().time()
        self._check_later()
        return place

    def arrived(self, place: Place) -> None:
        """The message has arrived. It keeps its place until it is copied."""
        self._since_s.pop(place, None)
        self._places.keep(place)

    def end(self, place: Place) -> None:
        """Frees the place."""
        self._since_s.pop(place, None)
        self._places.release(place)
        if self._waiting:
            self._serve_waiting(self._places.fits)

    async def _turn(self, sender: Sender, give_up: GiveUp) -> Place:
        loop = asyncio.get_running_loop()
        waiting = _Waiting(sender, give_up, loop.create_future(), loop.time())
        self._waiting.add(sender, waiting)
        self._check_later()
        try:
            return await waiting.place
        except asyncio.CancelledError:
            self._waiting.remove(sender, waiting)
            if waiting.place.done() and not waiting.place.cancelled() and waiting.place.exception() is None:
                self.end(waiting.place.result())
            else:
                self._serve_waiting(self._places.fits)  # a call behind this one may have been passed over
            raise

    def _serve_waiting(self, may_try: Callable[[Sender], bool]) -> None:
        """Gives places to the first calls of waiting senders."""
        senders = self._waiting.next_names(MAX_TRIED)
        served: list[Sender] = []
        for sender in senders:
            waiting = self._waiting.first(sender)
            if waiting.place.done() or not may_try(sender):
                continue  # its call was cancelled, or it has to wait
            with suppress(RequestRefused):
                waiting.place.set_result(self._places.take(sender, waiting.give_up))
                self._waiting.remove(sender, waiting)
                served.append(sender)
        for sender in served or senders:  # if none could be served, the next ones are tried next time
            self._waiting.pass_turn(sender)

    def _check_later(self) -> None:
        if self._check_timer is None:
            self._check_timer = asyncio.get_running_loop().call_later(CHECK_S, self._check)

    def _check(self) -> None:
        """Gives up what takes too long, and serves calls that wait at the cost of what takes long."""
        self._check_timer = None
        now_s = asyncio.get_running_loop().time()
        for place, since_s in list(self._since_s.items()):
            if now_s - since_s >= MESSAGE_TIMEOUT_S:
                self.end(place)
                place.give_up(invalid("request", f"its message did not arrive within {MESSAGE_TIMEOUT_S:g} s"))
            elif now_s - since_s >= LONG_S:
                self._places.loosen(place)
            else:
                break
        for waiting in [each for each in self._waiting if now_s - each.since_s >= MESSAGE_TIMEOUT_S]:
            self._waiting.remove(waiting.sender, waiting)
            waiting.place.set_exception(_no_place())
        self._serve_waiting(lambda _: True)
        if self._since_s or self._waiting:
            self._check_later()


class _Waiting:
    """A call that waits for a place."""

    __slots__ = ("give_up", "place", "sender", "since_s")

    def __init__(self, sender: Sender, give_up: GiveUp, place: "asyncio.Future[Place]", since_s: float) -> None:
        self.sender = sender
        self.give_up = give_up
        self.place = place
        self.since_s = since_s


def _no_place() -> RequestRefused:
    problem = f"the message had no turn to be read within {MESSAGE_TIMEOUT_S:g} s"
    return RequestRefused(CODE_RESOURCE_EXHAUSTED, OVERLOADED, problem, retry_delay_ms=RETRY_MS)


class MessageTurns:
    """Decides when the event loop takes messages that have arrived."""

    def __init__(self) -> None:
        self._free_s = 0.0  # when the loop is done with what it took, at its pace
        self._free_of_account_s: dict[str, float] = {}  # the same of an account's large messages
        self._waiting: FairQueue[str, asyncio.Future[None]] = FairQueue()  # by account
        self._timer: asyncio.Handle | None = None

    async def turn(self, account: str) -> None:
        """Returns when the account's next message may be taken. The caller must call took() before it awaits again."""
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        if self._wait_s(now_s) <= 0.0 and self._is_within_rate(account, now_s):
            return
        turn = loop.create_future()
        self._waiting.add(account, turn)
        self._wake_in(RETRY_S)
        try:
            await turn
        finally:
            self._waiting.remove(account, turn)

    def took(self, account: str, num_bytes: int) -> None:
        """Records that a message of `num_bytes` was taken, or something that took the loop as long."""
        now_s = asyncio.get_running_loop().time()
        self._free_s = max(now_s, self._free_s) + num_bytes / TAKEN_BYTES_PER_S
        if num_bytes > LARGE_BYTES:
            free_s = self._free_of_account_s
            if len(free_s) >= MAX_ACCOUNTS:
                free_s = self._free_of_account_s = {each: at_s for each, at_s in free_s.items() if at_s > now_s}
            free_s[account] = max(now_s, free_s.get(account, 0.0)) + num_bytes / ACCOUNT_BYTES_PER_S

    def _wait_s(self, now_s: float) -> float:
        """How long the loop's next message has to wait."""
        return self._free_s - BURST_BYTES / TAKEN_BYTES_PER_S - now_s

    def _is_within_rate(self, account: str, now_s: float) -> bool:
        return self._free_of_account_s.get(account, 0.0) - MAX_AHEAD_S <= now_s

    def _wake_in(self, wait_s: float) -> None:
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(wait_s, self._wake) if wait_s > 0.0 else loop.call_soon(self._wake)

    def _wake(self) -> None:
        """Wakes the next call that may go. It takes its message before this runs again."""
        self._timer = None
        now_s = asyncio.get_running_loop().time()
        wait_s = self._wait_s(now_s)
        if wait_s <= 0.0:
            wait_s = RETRY_S
            for account in self._waiting.next_names(MAX_TRIED):
                self._waiting.pass_turn(account)
                if self._is_within_rate(account, now_s):
                    turn = self._waiting.first(account)
                    self._waiting.remove(account, turn)
                    if not turn.done():  # its call was not cancelled
                        turn.set_result(None)
                    wait_s = 0.0
                    break
        if self._waiting:
            self._wake_in(wait_s)


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

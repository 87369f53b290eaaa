"""Decides which calls may have their messages read now.

A call whose message has not been read costs little: the stream's flow-control window bounds what its client has sent.
A message being read takes memory as it arrives, and its size is not known in advance. So only some are read at once.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from itertools import islice
from typing import NamedTuple
from weakref import WeakValueDictionary

from trunkline.status import CODE_RESOURCE_EXHAUSTED, OVERLOADED, RequestRefused, invalid
from trunkline_router.access.gate.places import RETRY_MS, Bounds, GiveUp, Place, Places, Sender

MESSAGE_TIMEOUT_S = 30.0  # until a message has arrived, and until its reading begins: the largest at 2 Mbit/s
LONG_S = 1.0  # a message that takes longer may be given up for a sender with fewer
CHECK_S = 0.25  # between two looks at what takes long
MAX_TRIED = 64  # senders that are considered at once; the others follow

# Messages being read at once, each of at most request_size.MAX_REQUEST_BYTES.
READ_BOUNDS = Bounds(in_all=96, of_host=80, of_connection=48, of_tenant=32, spare=24)


class _Waiting(NamedTuple):
    place: "asyncio.Future[Place]"
    give_up: GiveUp


class Reading:
    """Places for messages being read. Senders take turns: of each one a single call waits for a place, and its others
    wait for that one."""

    def __init__(self, bounds: Bounds = READ_BOUNDS) -> None:
        self._places = Places(bounds, "messages being read")
        self._since_s: dict[Place, float] = {}  # of messages that have not arrived, the oldest first
        self._waiting: dict[Sender, _Waiting] = {}  # in the order of their turns
        self._turns_of_senders: WeakValueDictionary[Sender, asyncio.Lock] = WeakValueDictionary()
        self._check_timer: asyncio.TimerHandle | None = None

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
        turn = self._turns_of_senders.setdefault(sender, asyncio.Lock())
        try:
            # The look after the timeout gives up messages, whose places may be for this call.
            async with asyncio.timeout(MESSAGE_TIMEOUT_S + CHECK_S), turn:
                return await self._first(sender, give_up)
        except TimeoutError:
            problem = f"the message had no turn to be read within {MESSAGE_TIMEOUT_S:g} s"
            raise RequestRefused(CODE_RESOURCE_EXHAUSTED, OVERLOADED, problem, retry_delay_ms=RETRY_MS) from None

    async def _first(self, sender: Sender, give_up: GiveUp) -> Place:
        """Waits as the first call of its sender."""
        with suppress(RequestRefused):
            return self._places.take(sender, give_up)  # others may have left places meanwhile
        place: asyncio.Future[Place] = asyncio.get_running_loop().create_future()
        self._waiting[sender] = _Waiting(place, give_up)
        self._check_later()
        try:
            return await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():  # it was served at the last moment
                self.end(place.result())
            else:
                del self._waiting[sender]
            raise

    def _serve_waiting(self, may_try: Callable[[Sender], bool]) -> None:
        """Gives places to the first calls of waiting senders."""
        tried = [*islice(self._waiting.items(), MAX_TRIED)]
        for sender, waiting in tried:
            if not waiting.place.done() and may_try(sender):
                with suppress(RequestRefused):
                    waiting.place.set_result(self._places.take(sender, waiting.give_up))
                    del self._waiting[sender]
        if len(self._waiting) > MAX_TRIED and all(sender in self._waiting for sender, _ in tried):
            for sender, waiting in tried:  # none could be served: the next ones are tried next time
                del self._waiting[sender]
                self._waiting[sender] = waiting

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
        self._serve_waiting(lambda _: True)
        if self._since_s or self._waiting:
            self._check_later()

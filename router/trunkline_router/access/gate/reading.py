"""Decides which calls may have their messages read now.

A call whose message has not been read costs little: the stream's flow-control window bounds what its client has sent.
A message being read takes memory as it arrives, and its size is not known in advance. So only some calls are read at
once. gRPC does not report how much of a message has arrived. If every place is taken and a sender with fewer places
waits, the sender with the most places loses a message that has taken long.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import islice

from trunkline.status import CODE_RESOURCE_EXHAUSTED, OVERLOADED, RequestRefused, invalid
from trunkline_router.access.gate.rotation import Path, Rotation
from trunkline_router.access.gate.sender import Sender

MESSAGE_TIMEOUT_S = 30.0  # from the start of the call until its message has arrived: the largest at 2 Mbit/s
LONG_S = 5.0  # a message may be given up after being read for this long
HURRY_S = 0.2  # the same for a message in one of the last places
MAX_SENDERS_PER_ROUND = 256  # waiting senders served by one round of _reclaim(); the next round is HURRY_S later
RETRY_MS = 1000


@dataclass(frozen=True, slots=True)
class ReadBounds:
    """Largest numbers of messages being read at once, each of at most request_size.MAX_REQUEST_BYTES.

    A message that has already arrived holds its place for one turn of the event loop. The `last` places, of a host and
    of all, are for such messages: half-open calls lose them after HURRY_S.
    """

    in_all: int = 96
    of_host: int = 80  # leaves places for other hosts
    of_connection: int = 48
    of_sender: int = 12  # of one tenant on one connection
    last: int = 24

    def of(self, path: Path) -> int:
        """The limit of a host, a connection, or a tenant on a connection."""
        return (self.in_all, self.of_host, self.of_connection, self.of_sender)[len(path)]


class Reading:
    """Places for messages being read. Senders that wait for a place take turns."""

    def __init__(self, bounds: ReadBounds = ReadBounds(), *, long_s: float = LONG_S, hurry_s: float = HURRY_S) -> None:
        self._bounds, self._long_s, self._hurry_s = bounds, long_s, hurry_s
        self._free = bounds.in_all
        self._taken: Counter[Path] = Counter()  # by host, by connection, and by tenant on a connection
        self._readers: dict[_Reader, None] = {}  # longest-running first
        self._waiting: Rotation[asyncio.Future[None]] = Rotation()
        self._reclaim_timer: asyncio.TimerHandle | None = None

    @asynccontextmanager
    async def place(self, sender: Sender) -> AsyncIterator[Callable[[], None]]:
        """Holds a place while a message is read. Yields a function to call when the message has arrived.

        Raises RequestRefused if the message takes too long, or gets no place, or must make room.
        """
        loop = asyncio.get_running_loop()
        reader: _Reader | None = None
        timeout = asyncio.timeout(MESSAGE_TIMEOUT_S)
        begin_s = loop.time()
        try:
            async with timeout:
                if sender in self._waiting or not all(map(self._may_take, sender.paths)):
                    await self._turn(sender)
                else:
                    self._take(sender)
                due_s = loop.time() + (self._hurry_s if self._is_among_last(sender) else self._long_s)
                reader = _Reader(sender, timeout, due_s)
                self._readers[reader] = None

                def arrived() -> None:
                    if reader in self._readers and not timeout.expired():
                        del self._readers[reader]
                        timeout.reschedule(None)

                try:
                    yield arrived
                finally:
                    self._readers.pop(reader, None)
                    self._leave(sender)
        except TimeoutError:
            if not timeout.expired():
                raise
            if reader is not None and loop.time() - begin_s >= MESSAGE_TIMEOUT_S:
                raise invalid("request", f"its message did not arrive within {MESSAGE_TIMEOUT_S:g} s") from None
            problem = "the message took long to arrive, and others are waiting to be read"
            if reader is None:
                problem = f"the message had no turn to be read within {MESSAGE_TIMEOUT_S:g} s"
            raise RequestRefused(CODE_RESOURCE_EXHAUSTED, OVERLOADED, problem, retry_delay_ms=RETRY_MS) from None

    async def _turn(self, sender: Sender) -> None:
        loop = asyncio.get_running_loop()
        turn = loop.create_future()
        self._waiting.add(sender, turn)
        if self._reclaim_timer is None:
            self._reclaim_timer = loop.call_later(self._hurry_s, self._reclaim)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._waiting.remove(sender, turn)
                self._pass_on()  # a later call may have queued behind this one
            else:
                self._leave(sender)
            raise

    def _may_take(self, path: Path) -> bool:
        return self._free > 0 and self._taken[path] < self._bounds.of(path)

    def _take(self, sender: Sender) -> None:
        self._free -= 1
        for path in sender.paths:
            self._taken[path] += 1

    def _is_among_last(self, sender: Sender) -> bool:
        bounds = self._bounds
        return self._free < bounds.last or self._taken[sender[:1]] > bounds.of_host - bounds.last

    def _leave(self, sender: Sender) -> None:
        self._free += 1
        for path in sender.paths:
            self._taken[path] -= 1
            if not self._taken[path]:
                del self._taken[path]
        self._pass_on()

    def _pass_on(self) -> None:
        while self._free and (found := self._waiting.pop(self._may_take)) is not None:
            sender, turn = found
            if not turn.done():  # its call is not cancelled
                self._take(sender)
                turn.set_result(None)

    def _reclaim(self) -> None:
        """Gives up messages that have taken long in favour of waiting senders with fewer places."""
        self._reclaim_timer = None
        if not self._waiting:
            return
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        due = [reader for reader in self._readers if reader.due_s <= now_s]
        taken = Counter(self._taken)
        for waiting in islice(self._waiting.senders(), MAX_SENDERS_PER_ROUND):
            given_up = self._reader_to_evict(waiting, due, taken)
            if given_up is not None:
                due.remove(given_up)
                del self._readers[given_up]
                for path in given_up.sender.paths:
                    taken[path] -= 1
                for path in waiting.paths:
                    taken[path] += 1
                given_up.timeout.reschedule(now_s)
        self._reclaim_timer = loop.call_later(self._hurry_s, self._reclaim)

    def _reader_to_evict(self, waiting: Sender, due: "Sequence[_Reader]", taken: Counter[Path]) -> "_Reader | None":
        """The reader among `due` whose sender has the most places. Returns None if no sender has more than the waiting
        one, or if the waiting sender is at its own limit."""
        full = next((path for path in waiting.paths if taken[path] >= self._bounds.of(path)), ())
        if full == waiting or (not full and self._free):
            return None
        among = [reader for reader in due if reader.sender[: len(full)] == full]
        if not among:
            return None
        # Among equals the longest-running.
        most = max(among, key=lambda reader: [taken[path] for path in reader.sender.paths])
        for ours, theirs in zip(waiting.paths, most.sender.paths, strict=True):
            if ours != theirs:
                return most if taken[ours] < taken[theirs] else None
        return None


@dataclass(frozen=True, slots=True, eq=False)
class _Reader:
    """A message being read. It may be given up after `due_s`."""

    sender: Sender
    timeout: asyncio.Timeout
    due_s: float

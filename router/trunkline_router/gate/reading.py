"""Which calls may have their messages read now.

A call whose message is not read yet costs little: what its client has sent of it stays within the stream's window, the
rest stays with the client. A message that is being read lies in memory as far as it has come, and how long it will be
is not known before. So not all are read at once. gRPC does not tell how much of a message has come: where every place
is taken and a sender with fewer waits, the holder of most places gives up a message that has taken long.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import islice

from trunkline.status import CODE_RESOURCE_EXHAUSTED, OVERLOADED, RequestRefused, invalid
from trunkline_router.gate.rotation import Path, Rotation
from trunkline_router.gate.sender import Sender

MESSAGE_TIMEOUT_S = 30.0  # from the call's begin until its message has come: the largest at 2 Mbit/s
LONG_S = 5.0  # a message that has been read for so long may be given up
HURRY_S = 0.2  # so may one that took one of the last places
MOST_LOOKED_AT = 256  # senders that wait: others follow HURRY_S later
RETRY_MS = 1000


@dataclass(frozen=True, slots=True)
class ReadBounds:
    """How many messages are read at once, each of request_size.MAX_REQUEST_BYTES at most. A message that has come
    already takes its place for one turn of the event loop. The last places of a host, and of all, are for such ones:
    half-open calls do not keep them."""

    in_all: int = 96
    of_host: int = 80  # others find places
    of_connection: int = 48
    of_sender: int = 12  # of a tenant's on one connection
    last: int = 24

    def of(self, path: Path) -> int:
        """How many a host, a connection, or a tenant on a connection may have."""
        return (self.in_all, self.of_host, self.of_connection, self.of_sender)[len(path)]


class Reading:
    """Places for messages. Senders that wait for one take turns."""

    def __init__(self, bounds: ReadBounds = ReadBounds(), *, long_s: float = LONG_S, hurry_s: float = HURRY_S) -> None:
        self._bounds, self._long_s, self._hurry_s = bounds, long_s, hurry_s
        self._free = bounds.in_all
        self._taken: Counter[Path] = Counter()  # of a host, of a connection, and of a tenant on it
        self._readers: dict[_Reader, None] = {}  # the longest first
        self._waiting: Rotation[asyncio.Future[None]] = Rotation()
        self._hurrying: asyncio.TimerHandle | None = None

    @asynccontextmanager
    async def place(self, sender: Sender) -> AsyncIterator[Callable[[], None]]:
        """Held while a message is read; with a function to call when it has arrived. Raises RequestRefused where that
        takes too long."""
        loop = asyncio.get_running_loop()
        reader: _Reader | None = None
        patience = asyncio.timeout(MESSAGE_TIMEOUT_S)
        begin_s = loop.time()
        try:
            async with patience:
                if sender in self._waiting or not all(map(self._may_take, sender.paths)):
                    await self._turn(sender)
                else:
                    self._take(sender)
                due_s = loop.time() + (self._hurry_s if self._is_among_last(sender) else self._long_s)
                reader = _Reader(sender, patience, due_s)
                self._readers[reader] = None

                def arrived() -> None:
                    if reader in self._readers and not patience.expired():
                        del self._readers[reader]
                        patience.reschedule(None)

                try:
                    yield arrived
                finally:
                    self._readers.pop(reader, None)
                    self._leave(sender)
        except TimeoutError:
            if not patience.expired():
                raise
            if reader is not None and loop.time() - begin_s >= MESSAGE_TIMEOUT_S:
                raise invalid("request", f"its message did not arrive within {MESSAGE_TIMEOUT_S:g} s") from None
            problem = "the message took long to arrive, and others wait to be read"
            if reader is None:
                problem = f"other messages were read for {MESSAGE_TIMEOUT_S:g} s, and this one had no turn"
            raise RequestRefused(CODE_RESOURCE_EXHAUSTED, OVERLOADED, problem, retry_delay_ms=RETRY_MS) from None

    async def _turn(self, sender: Sender) -> None:
        loop = asyncio.get_running_loop()
        turn = loop.create_future()
        self._waiting.add(sender, turn)
        if self._hurrying is None:
            self._hurrying = loop.call_later(self._hurry_s, self._hurry)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._waiting.remove(sender, turn)
                self._pass_on()  # to one that came while this one's turn was still there
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

    def _hurry(self) -> None:
        """Gives up messages that have taken long, for senders that wait and have fewer places."""
        self._hurrying = None
        if not self._waiting:
            return
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        due = [reader for reader in self._readers if reader.due_s <= now_s]
        taken = Counter(self._taken)
        for waiting in islice(self._waiting.senders(), MOST_LOOKED_AT):
            given_up = self._given_up_for(waiting, due, taken)
            if given_up is not None:
                due.remove(given_up)
                del self._readers[given_up]
                for path in given_up.sender.paths:
                    taken[path] -= 1
                for path in waiting.paths:
                    taken[path] += 1
                given_up.patience.reschedule(now_s)
        self._hurrying = loop.call_later(self._hurry_s, self._hurry)

    def _given_up_for(self, waiting: Sender, due: "Sequence[_Reader]", taken: Counter[Path]) -> "_Reader | None":
        """Of the readers that are due, one of those who have most; None where none of them has more than the sender
        that waits, or where that sender waits for its own calls."""
        full = next((path for path in waiting.paths if taken[path] >= self._bounds.of(path)), ())
        if full == waiting or (not full and self._free):
            return None
        among = [reader for reader in due if reader.sender[: len(full)] == full]
        if not among:
            return None
        most = max(among, key=lambda reader: [taken[path] for path in reader.sender.paths])  # the longest of equals
        for ours, theirs in zip(waiting.paths, most.sender.paths, strict=True):
            if ours != theirs:
                return most if taken[ours] < taken[theirs] else None
        return None


@dataclass(frozen=True, slots=True, eq=False)
class _Reader:
    """A message that is being read; it may be given up when `due_s` is past."""

    sender: Sender
    patience: asyncio.Timeout
    due_s: float

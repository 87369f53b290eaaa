"""Which calls may have their messages read now.

A call whose message is not read yet costs little: what its client has sent of it stays within the stream's window, the
rest stays with the client. A message that is being read lies in memory as far as it has come, and how long it will be
is not known before. So few are read at once. Where calls wait for that, messages that take long to come are given up.
"""

import asyncio
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from trunkline.status import CODE_RESOURCE_EXHAUSTED, OVERLOADED, RequestRefused, invalid

# Each may have request_size.MAX_REQUEST_BYTES. Most are short, have come already, and take their places for one turn of
# the event loop, so an account needs several.
MAX_READ, MAX_ACCOUNT_READ = 48, 12
READ_TIMEOUT_S = 30.0  # for a message that no other one waits for: the largest at 2 Mbit/s
HURRY_S = 0.2  # where others wait
RETRY_MS = 1000


class Reading:
    """Places for messages. Accounts that wait for one take turns."""

    def __init__(
        self, most: int = MAX_READ, most_of_account: int = MAX_ACCOUNT_READ, *, hurry_s: float = HURRY_S
    ) -> None:
        self._free, self._most_of_account, self._hurry_s = most, most_of_account, hurry_s
        self._taken: Counter[str] = Counter()  # by account
        self._reading: OrderedDict[asyncio.Timeout, float] = OrderedDict()  # since when, the longest first
        self._waiting: dict[str, OrderedDict[asyncio.Future[None], None]] = {}  # by account, the next one's turn first
        self._hurrying: asyncio.TimerHandle | None = None

    @asynccontextmanager
    async def place(self, account: str) -> AsyncIterator[Callable[[], None]]:
        """Held while a message is read; with a function to call when it has arrived. Raises RequestRefused where that
        takes too long."""
        if not self._free or account in self._waiting or self._taken[account] >= self._most_of_account:
            await self._turn(account)
        else:
            self._take(account)
        loop = asyncio.get_running_loop()
        patience = asyncio.timeout(READ_TIMEOUT_S)
        since_s = loop.time()

        def arrived() -> None:
            if self._reading.pop(patience, None) is not None and not patience.expired():
                patience.reschedule(None)

        try:
            async with patience:
                self._reading[patience] = since_s
                yield arrived
        except TimeoutError:
            if loop.time() - since_s >= READ_TIMEOUT_S:
                raise invalid("request", f"its message did not arrive within {READ_TIMEOUT_S:g} s") from None
            problem = f"the message did not arrive within {self._hurry_s:g} s, and others wait to be read"
            raise RequestRefused(CODE_RESOURCE_EXHAUSTED, OVERLOADED, problem, retry_delay_ms=RETRY_MS) from None
        finally:
            self._reading.pop(patience, None)
            self._leave(account)

    async def _turn(self, account: str) -> None:
        loop = asyncio.get_running_loop()
        turn = loop.create_future()
        self._waiting.setdefault(account, OrderedDict())[turn] = None
        if self._hurrying is None:
            self._hurrying = loop.call_later(self._hurry_s, self._hurry)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._forget(account, turn)
                self._pass_on()  # to one that came while this one's turn was still there
            else:
                self._leave(account)
            raise

    def _take(self, account: str) -> None:
        self._free -= 1
        self._taken[account] += 1

    def _leave(self, account: str) -> None:
        self._free += 1
        self._taken[account] -= 1
        if not self._taken[account]:
            del self._taken[account]
        self._pass_on()

    def _pass_on(self) -> None:
        while self._waiting and self._free:
            ready = next((each for each in self._waiting if self._taken[each] < self._most_of_account), None)
            if ready is None:
                return
            turns = self._waiting.pop(ready)
            turn, _ = turns.popitem(last=False)
            if turns:
                self._waiting[ready] = turns  # behind the others
            if not turn.done():  # its call is not cancelled
                self._take(ready)
                turn.set_result(None)

    def _forget(self, account: str, turn: "asyncio.Future[None]") -> None:
        turns = self._waiting.get(account, OrderedDict())
        turns.pop(turn, None)
        if not turns:
            self._waiting.pop(account, None)

    def _hurry(self) -> None:
        """Gives up messages that have taken long, as many as wait."""
        self._hurrying = None
        if not self._waiting:
            return
        loop = asyncio.get_running_loop()
        now_s, most = loop.time(), sum(map(len, self._waiting.values()))
        for patience, since_s in list(self._reading.items())[:most]:
            if now_s - since_s >= self._hurry_s:
                patience.reschedule(now_s)
        self._hurrying = loop.call_later(self._hurry_s, self._hurry)

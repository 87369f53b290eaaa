"""When streams with news may send them on: at once while there is time, together and a little later when there is not.

To hand a token to its stream is ten times cheaper than a message to a client. So after a round, in which streams write,
the next one is put off for a time in proportion to it: under load a third of the time stays for what workers say
meanwhile, and it leaves in fewer messages. With nothing to do between rounds, none is put off.
"""

import asyncio
import time
from collections.abc import Callable

# Times what a round's streams took to write: what becomes of the writes afterwards takes about as long again, and as
# much is free.
REST_PER_ROUND = 2.0
MOST_REST_S = 0.01


class Fanout:
    """One for all streams of an event loop."""

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._due: dict[asyncio.Event, None] = {}
        self._is_round = False  # under way
        self._began_s = 0.0
        self._rest_until_s = 0.0

    def has_news(self, due: asyncio.Event) -> None:
        """Sets the stream's event in the next round."""
        if not self._due and not self._is_round:
            self._schedule()
        self._due[due] = None

    def _schedule(self) -> None:
        loop = asyncio.get_running_loop()
        rest_s = self._rest_until_s - self._clock_s()
        if rest_s > 0:
            loop.call_later(rest_s, self._round)
        else:
            loop.call_soon(self._round)

    def _round(self) -> None:
        # The tasks that are woken here run between the other two, and write as far as their clients let them.
        loop = asyncio.get_running_loop()
        self._is_round = True
        loop.call_soon(self._begin)
        due, self._due = self._due, {}
        for event in due:
            event.set()
        loop.call_soon(self._end)

    def _begin(self) -> None:
        self._began_s = self._clock_s()

    def _end(self) -> None:
        now_s = self._clock_s()
        self._rest_until_s = now_s + min(REST_PER_ROUND * (now_s - self._began_s), MOST_REST_S)
        self._is_round = False
        if self._due:
            self._schedule()

"""When streams with news may send them on: at once while there is time, together and a little later when there is not.

Handing a token to its stream is several times cheaper than a message to a client. So after a round in which streams
wrote, the next round is put off for as long as that one took, at most MOST_REST_S: under load half of the time stays
for what workers say meanwhile, and it leaves in fewer messages. With nothing to do between rounds, none is put off.
"""

import asyncio
import time
from collections.abc import Callable

MOST_REST_S = 0.005


class Fanout:
    """One for all streams of an event loop."""

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._due: dict[asyncio.Event, None] = {}
        self._rest_until_s = 0.0

    def has_news(self, due: asyncio.Event) -> None:
        """Sets the stream's event in the next round."""
        if not self._due:
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
        began_s = self._clock_s()
        due, self._due = self._due, {}
        for event in due:
            event.set()
        # The tasks that were woken run before this: by then they have written, as far as their clients let them.
        asyncio.get_running_loop().call_soon(self._rest, began_s)

    def _rest(self, began_s: float) -> None:
        now_s = self._clock_s()
        self._rest_until_s = now_s + min(now_s - began_s, MOST_REST_S)

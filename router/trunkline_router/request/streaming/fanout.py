"""Schedules when streams write new output to their clients: at once when idle, in batches under load.

Handing a token to its stream is ten times cheaper than sending a message to a client. So after a round, in which
streams write, the next round is delayed in proportion to the time of the last one. Under load, this leaves a third of
the time for workers' output, which then goes out in fewer messages. A round is not delayed if the event loop was idle
for that time.
"""

import asyncio
import time
from collections.abc import Callable

# Delay in multiples of a round's time: the transport takes about as long again for the writes, and as much stays free.
REST_PER_ROUND = 2.0
MOST_REST_S = 0.01


class Fanout:
    """Schedules the writes of all streams of an event loop."""

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._due: dict[asyncio.Event, None] = {}
        self._is_round = False  # whether a round is under way
        self._began_s = 0.0
        self._rest_until_s = 0.0

    def add(self, due: asyncio.Event) -> None:
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
        # The tasks that are woken here run between _begin() and _end(), and write as much as flow control permits.
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

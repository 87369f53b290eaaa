"""The ends of choices that were aborted, as the worker tells them. They only explain what became of a request, so they
are awaited for a short time."""

import asyncio
from collections.abc import Callable

from trunkline.v1.worker_pb2 import Timeline
from trunkline_router.workers.sessions.sink_call import deliver

PATIENCE_S = 1.0  # a worker's front answers an abort within milliseconds
MOST_AWAITED = 4096

# Takes the timeline of an aborted choice; None: the worker did not tell it in time.
EndSink = Callable[[Timeline | None], None]


class AwaitedEnds:
    """Those of one session. Each sink is called once."""

    def __init__(self, patience_s: float = PATIENCE_S) -> None:
        self._patience_s = patience_s
        self._awaited: dict[int, tuple[EndSink, float]] = {}  # by handle, with the time of giving up; oldest first
        self._timer: asyncio.TimerHandle | None = None  # for the oldest

    def __len__(self) -> int:
        return len(self._awaited)

    def await_end(self, handle: int, sink: EndSink) -> bool:
        """Has the sink called with the choice's timeline. Returns False if too many are awaited already."""
        if len(self._awaited) >= MOST_AWAITED:
            return False
        loop = asyncio.get_running_loop()
        until_s = loop.time() + self._patience_s
        self._awaited[handle] = (sink, until_s)
        if self._timer is None:
            self._timer = loop.call_at(until_s, self._expire, loop)
        return True

    def take(self, handle: int, timeline: Timeline) -> bool:
        """Takes a timeline. Returns False if it is not awaited."""
        awaited = self._awaited.pop(handle, None)
        if awaited is None:
            return False
        deliver(awaited[0], timeline)
        return True

    def give_up(self) -> None:
        """No more timelines will come."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        awaited, self._awaited = self._awaited, {}
        for sink, _ in awaited.values():
            deliver(sink, None)

    def _expire(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        now_s = loop.time()
        late = [handle for handle, (_, until_s) in self._awaited.items() if until_s <= now_s]
        for handle in late:
            deliver(self._awaited.pop(handle)[0], None)
        if self._awaited and self._timer is None:
            _, until_s = next(iter(self._awaited.values()))
            self._timer = loop.call_at(until_s, self._expire, loop)

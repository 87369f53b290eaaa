"""The requests of other routers, for streams of views: few questions, and no view waits for them."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from trunkline.v1.fleet_pb2 import OtherRouters, RequestSummary
from trunkline_router.observe.lookup.fleet_requests import summaries
from trunkline_router.observe.lookup.question import Heard, Question
from trunkline_router.observe.lookup.viewer import Viewer
from trunkline_runtime.log import get_logger

EVERY_S = 3.0  # between two questions for viewers with the same rights
FORGOTTEN_S = 10.0  # without a view


@dataclass(frozen=True, slots=True)
class OthersList:
    """What the other routers list."""

    requests: Sequence[RequestSummary]
    routers: OtherRouters


@dataclass(slots=True)
class _Looked:
    asking: "asyncio.Task[None]"
    asked_s: float
    looked_s: float
    latest: OthersList | None = None


class OthersLists:
    """Asks other routers in the background while views are made.  ask: asks them"""

    def __init__(self, ask: Callable[[Question], Awaitable[Heard]], clock_s: Callable[[], float]) -> None:
        self._ask = ask
        self._clock_s = clock_s
        self._of: dict[Viewer, _Looked] = {}  # as many as there are watchers

    def latest(self, question: Question) -> OthersList | None:
        """Returns what they last listed for the question's viewer, and asks them again if that was long ago; None if
        they have not been heard yet. All questions for a viewer must be the same."""
        now_s = self._clock_s()
        for viewer, looked in list(self._of.items()):
            if now_s - looked.looked_s > FORGOTTEN_S and looked.asking.done():
                del self._of[viewer]
        found = self._of.get(question.viewer)
        if found is None:
            task = asyncio.create_task(self._update(question))
            self._of[question.viewer] = _Looked(task, now_s, now_s)
            return None
        found.looked_s = now_s
        if now_s - found.asked_s >= EVERY_S and found.asking.done():
            found.asked_s, found.asking = now_s, asyncio.create_task(self._update(question))
        return found.latest

    async def _update(self, question: Question) -> None:
        try:
            heard = await self._ask(question)
        except Exception as error:  # a view shows this router's requests all the same
            get_logger().error("other routers cannot be asked", exc_info=error)
            return
        self._of[question.viewer].latest = OthersList(summaries(heard.answers), heard.routers)

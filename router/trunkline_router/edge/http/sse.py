"""Server-sent events as an ASGI response: https://html.spec.whatwg.org/multipage/server-sent-events.html

stream = EventStream(send, keep_alive_s=15.0)
try:
    with stream:
        async for data in answer:
            await stream.write(event(data))
        await stream.end(DONE)
except RequestRefused as refused:
    ...  # as an event if stream.has_begun, else as a response with its own status
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from types import TracebackType
from typing import Any

from trunkline_router.record.error_statuses import Header

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

KEEP_ALIVE_S = 15.0  # proxies cut connections that are silent for 50 to 120 s
KEEP_ALIVE = b": keep-alive\n\n"  # a comment: clients ignore it
DONE = b"data: [DONE]\n\n"
HEADERS: tuple[Header, ...] = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would otherwise collect events
)


def event(data: bytes, name: bytes = b"") -> bytes:
    """One event.  data: without line breaks, such as JSON;  name: the event's type, if it is not `message`"""
    return b"event: %b\ndata: %b\n\n" % (name, data) if name else b"data: %b\n\n" % data


class EventStream:
    """Writes the events of one response. As a context, it sends comments while there are no events.

    Status and headers are sent with the first event or comment. An error before that can have its own status.

    keep_alive_s: a comment is sent whenever nothing was written for this long; 0: never
    headers: sent in addition to HEADERS; called once, when the status is sent
    """

    __slots__ = ("_comment", "_headers", "_keep_alive_s", "_last_s", "_loop", "_send", "_timer", "has_begun")

    def __init__(
        self, send: Send, *, keep_alive_s: float = KEEP_ALIVE_S, headers: Callable[[], Iterable[Header]] = tuple
    ) -> None:
        self._send = send
        self._keep_alive_s = keep_alive_s
        self._headers = headers
        self._loop = asyncio.get_running_loop()
        self._last_s = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None
        self._comment: asyncio.Task[None] | None = None
        self.has_begun = False  # whether the status is sent: later errors must be events

    def __enter__(self) -> "EventStream":
        self._last_s = self._loop.time()
        if self._keep_alive_s:
            self._timer = self._loop.call_at(self._last_s + self._keep_alive_s, self._keep_alive)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._comment is not None:
            self._comment.cancel()
            self._comment = None

    async def write(self, events: bytes) -> None:
        """Writes one or more whole events. Returns when the client's connection can take more."""
        self._last_s = self._loop.time()
        if not self.has_begun:
            await self._begin()
        await self._send({"type": "http.response.body", "body": events, "more_body": True})

    async def end(self, events: bytes = b"") -> None:
        """Writes the last events and ends the response."""
        self.__exit__(None, None, None)
        if not self.has_begun:
            await self._begin()
        await self._send({"type": "http.response.body", "body": events, "more_body": False})

    async def _begin(self) -> None:
        self.has_begun = True
        # The server writes what it is sent before it waits for anything. So a comment of another task cannot come
        # between this and the first event.
        await self._send({"type": "http.response.start", "status": 200, "headers": [*HEADERS, *self._headers()]})

    def _keep_alive(self) -> None:
        now_s = self._loop.time()
        if now_s >= self._last_s + self._keep_alive_s and (self._comment is None or self._comment.done()):
            self._comment = self._loop.create_task(self.write(KEEP_ALIVE))
            self._last_s = now_s
        due_s = max(self._last_s + self._keep_alive_s, now_s + self._keep_alive_s / 16)
        self._timer = self._loop.call_at(due_s, self._keep_alive)

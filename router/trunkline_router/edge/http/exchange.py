"""One request and its response on an HTTP connection: the `receive` and `send` of an ASGI application."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, MutableMapping, Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from trunkline.status import internal
from trunkline_router.edge.http.headers import REQUEST_ID, request_id_of, response_headers
from trunkline_router.record.error_statuses import Header, body_for, refusal_headers
from trunkline_runtime.log import get_logger

if TYPE_CHECKING:
    from trunkline_router.edge.http.connection import Connection

Scope = MutableMapping[str, Any]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

HAS_BODY = "trunkline.has_body"  # a key of the ASGI scope
BODY_BYTES = 64 << 10  # of a body that the application has not taken; after the read that exceeds it, nothing is read
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}".encode() for status in HTTPStatus}
BODILESS = (204, 304)
PIECE_BYTES = 64 << 10  # of a long response


def has_body(scope: Scope) -> bool:
    """Whether the whole body of the request has arrived. Most come with the head."""
    return bool(scope[HAS_BODY])


async def respond(
    send: Send,
    status: int,
    body: bytes | Sequence[bytes],
    headers: Iterable[Header],
    content_type: bytes = b"application/json",
) -> None:
    """Sends a whole response: a long one in pieces, each once the client has read most of the one before, so that a
    client that reads slowly keeps no copy of it in memory."""
    pieces = [body] if isinstance(body, bytes) else body
    left = sum(map(len, pieces))
    own = [(b"content-type", content_type), *headers]
    if status not in BODILESS:
        own.append((b"content-length", b"%d" % left))
    await send({"type": "http.response.start", "status": status, "headers": own})
    for piece in pieces:
        for start in range(0, len(piece) or 1, PIECE_BYTES):
            part = piece[start : start + PIECE_BYTES]
            left -= len(part)
            await send({"type": "http.response.body", "body": part, "more_body": left > 0})


class CutOff(Exception):
    """Raised by an application that cannot complete a response that it has begun: the connection is dropped, so that
    the client does not take what it has for the whole. The application has recorded the reason."""


class Exchange:
    """Sends the response's head together with the first part of its body, which saves a system call. Waits for the
    client after a write rather than before the next one, so that output that it does not read stays with its producer,
    which can merge it.

    keeps_alive: whether another request may follow on the connection
    """

    def __init__(self, connection: "Connection", scope: Scope, *, keeps_alive: bool, expects_continue: bool) -> None:
        self.scope = scope
        self.keeps_alive = keeps_alive
        self.more_body = True  # whether some of the request's body has not arrived
        self.is_gone = False  # the client
        self.is_complete = False  # the response
        self.task: asyncio.Task[None] | None = None  # in which run() runs
        self._connection = connection
        self._expects_continue = expects_continue
        self._body: list[bytes] = []  # arrived and not taken by the application
        self._num_bytes = 0  # of it
        self._news = asyncio.Event()  # something for receive()
        self._head = b""  # of the response, not sent yet
        self._has_started = False
        self._is_chunked = False
        scope[HAS_BODY] = False

    @property
    def has_sent(self) -> bool:
        """Whether some of the response has been sent."""
        return self._has_started and not self._head

    # What the connection has to say

    def body_arrived(self, body: bytes) -> bool:
        """Takes a part of the request's body. Returns whether more of it may be read before receive() is called."""
        if self.is_complete:
            return True
        self._body.append(body)
        self._num_bytes += len(body)
        self._news.set()
        return self._num_bytes <= BODY_BYTES

    def body_ended(self) -> None:
        """The whole body has arrived."""
        self.more_body = False
        self.scope[HAS_BODY] = True
        self._news.set()

    def client_gone(self) -> None:
        """The client closes, or its request is refused: ends the application's work for it, wherever that waits."""
        self.is_gone = True
        if self.task is not None:
            self.task.cancel()

    # What the application calls

    async def receive(self) -> MutableMapping[str, Any]:
        """Returns the next part of the body."""
        if self._expects_continue and self.more_body and not self._body:
            self._connection.transport.write(CONTINUE)
        self._expects_continue = False
        self._connection.resume_reading()
        await self._news.wait()
        self._news.clear()
        body, self._body, self._num_bytes = b"".join(self._body), [], 0
        return {"type": "http.request", "body": body, "more_body": self.more_body}

    async def send(self, message: MutableMapping[str, Any]) -> None:
        """Writes a part of the response; nothing if the client has gone. Returns when more can be written."""
        if self.is_gone:
            return
        if not self._has_started and message["type"] == "http.response.start":
            self._start(message["status"], message.get("headers", ()))
        elif self._has_started and message["type"] == "http.response.body" and not self.is_complete:
            self._write(message.get("body", b""), more=message.get("more_body", False))
            if self._connection.is_writing_paused:
                await self._connection.drained()
        else:
            raise RuntimeError(f"unexpected {message['type']}")

    def _start(self, status: int, headers: Iterable[Header]) -> None:
        lines = [STATUS_LINES[status], self._connection.shared.date_line]
        has_length = False
        # A client that still waits for 100 Continue may send the body or leave it out (RFC 9110, 10.1.1).
        keeps_alive = self.keeps_alive and not (self._expects_continue and self.more_body)
        has_id = False
        for name, value in headers:
            lines.append(b"%b: %b" % (name, value))
            if name == b"content-length":
                has_length = True
            elif name == b"connection":
                keeps_alive = keeps_alive and value != b"close"
            elif name == REQUEST_ID:
                has_id = True
        if not has_id:  # answers that are not the router's own, such as those to preflights
            lines.append(b"%b: %b" % (REQUEST_ID, request_id_of(self.scope["headers"]).encode()))
        is_chunked = not has_length and status not in BODILESS and self.scope["http_version"] == "1.1"
        if is_chunked:
            lines.append(b"transfer-encoding: chunked")
        elif not has_length and status not in BODILESS:
            keeps_alive = False  # the response ends with the connection
        if not keeps_alive:
            lines.append(b"connection: close")
        head = b"\r\n".join((*lines, b"", b""))
        if head.count(b"\n") != len(lines) + 1 or head.count(b"\r") != len(lines) + 1 or b"\0" in head:
            raise RuntimeError("invalid header")  # its value could add headers or a response
        self.keeps_alive, self._is_chunked = keeps_alive, is_chunked
        self._head, self._has_started, self._expects_continue = head, True, False

    def _write(self, body: bytes, *, more: bool) -> None:
        head = self._head
        if self.scope["method"] == "HEAD":
            data = head
        elif self._is_chunked:
            data = b"%b%x\r\n%b\r\n" % (head, len(body), body) if body else head
            if not more:
                data += b"0\r\n\r\n"
        else:
            data = head + body if head else body
        self._head = b""
        if data:
            self._connection.transport.write(data)
        if not more:
            self.is_complete = True
            self._connection.response_complete()

    async def run(self, app: Callable[..., Any]) -> None:
        """Runs the application. If it fails, the client gets INTERNAL, or the connection is cut if the response has
        begun. It is cancelled if the client goes."""
        try:
            await app(self.scope, self.receive, self.send)
        except asyncio.CancelledError:
            if not self.is_gone:
                self._connection.drop()  # the server stops
            return
        except CutOff:
            pass
        except Exception as error:
            self._log("unexpected error", error)
        else:
            if self.is_complete or self.is_gone or self._connection.transport.is_closing():
                return
            self._log("a handler returned without a complete response")
        if not (self.is_complete or self.is_gone):
            await self._fail()

    def _log(self, problem: str, error: Exception | None = None) -> None:
        get_logger().error(problem, request_id=request_id_of(self.scope["headers"]), exc_info=error)

    async def _fail(self) -> None:
        if self.has_sent:
            self._connection.drop()  # the client must not take what it has for the whole response
            return
        self._has_started, self._head, self.keeps_alive = False, b"", False
        request_id = request_id_of(self.scope["headers"])
        refused = internal(request_id)
        body = body_for(self.scope["path"], refused, request_id)
        await respond(self.send, 500, body, [*response_headers(request_id), *refusal_headers(refused)])

"""One request and its response on an HTTP connection."""

import asyncio
from collections.abc import Callable

from uvicorn._types import ASGI3Application, ASGISendEvent, HTTPResponseBodyEvent, HTTPResponseStartEvent
from uvicorn.protocols.http.httptools_impl import HEADER_RE, HEADER_VALUE_RE, STATUS_LINE, RequestResponseCycle

from trunkline.status import internal
from trunkline_router.edge.http.disconnect import ClientGone
from trunkline_router.edge.http.headers import REQUEST_ID, request_id_of, response_headers
from trunkline_router.record.error_statuses import JSON_TYPE, body_for, refusal_headers
from trunkline_runtime.log import get_logger

BODILESS = (204, 304)


class Exchange(RequestResponseCycle):
    """Sends the response's head together with the first part of its body, which saves a system call. Waits for the
    client after a write rather than before the next one, so that output that it does not read stays with its producer,
    which can merge it.
    """

    _head: bytes = b""  # not sent yet
    _gone: Callable[[], None] | None = None

    def on_disconnect(self, call: Callable[[], None] | None) -> bool:
        """Sets what is called once if the client goes. Returns False if it has gone."""
        self._gone = call
        return not self.disconnected

    def has_whole_body(self) -> bool:
        """Whether the request's body has arrived."""
        return not self.more_body

    def has_sent(self) -> bool:
        """Whether the response has begun."""
        return self.response_started and not self._head

    def client_gone(self) -> None:
        """Records that the connection is lost."""
        self.disconnected = True
        self.message_event.set()
        call, self._gone = self._gone, None
        if call is not None:
            call()

    async def run_asgi(self, app: ASGI3Application) -> None:
        """Runs the application. If it fails, the client gets INTERNAL, or the connection is cut if the response has
        begun."""
        error: Exception | None = None
        try:
            await app(self.scope, self.receive, self.send)
        except asyncio.CancelledError:
            self.transport.abort()  # the server stops
        except ClientGone:
            pass
        except Exception as raised:
            error = raised
        try:
            if error is not None or not (self.response_complete or self.disconnected or self.transport.is_closing()):
                await self._fail(error)
        finally:
            self.on_response = _nothing  # breaks the cycle with the connection
            self._gone = None
            self.scope["extensions"] = {}  # the same

    async def _fail(self, error: Exception | None) -> None:
        request_id = request_id_of(self.scope["headers"])
        problem = "unexpected error" if error else "a handler returned without a complete response"
        get_logger().error(problem, request_id=request_id, exc_info=error)
        if self.response_complete or self.disconnected:
            return
        if self.has_sent():
            self.transport.abort()  # the client must not take what it has for the whole response
            return
        self.response_started, self._head = False, b""
        self.chunked_encoding, self.expected_content_length, self.keep_alive = None, 0, False
        refused = internal(request_id)
        body = body_for(self.scope["path"], refused, request_id)
        headers = [
            JSON_TYPE,
            (b"content-length", b"%d" % len(body)),
            *response_headers(request_id),
            *refusal_headers(refused),
        ]
        await self.send({"type": "http.response.start", "status": 500, "headers": headers})
        await self.send({"type": "http.response.body", "body": body, "more_body": False})

    async def send(self, message: ASGISendEvent) -> None:
        """Writes a part of the response; nothing if the client has gone. Returns when more can be written."""
        if self.disconnected:
            return
        if not self.response_started:
            if message["type"] != "http.response.start":
                raise RuntimeError(f"expected http.response.start, not {message['type']}")
            self._start(message)
            return
        if message["type"] != "http.response.body" or self.response_complete:
            raise RuntimeError(f"unexpected {message['type']}")
        self._write_body(message)
        if self.flow.write_paused:
            await self.flow.drain()

    def _start(self, message: HTTPResponseStartEvent) -> None:
        status = message["status"]
        parts = [STATUS_LINE[status]]
        closes = is_named = False
        for name, value in (*self.default_headers, *message.get("headers", ())):
            if HEADER_RE.search(name) or HEADER_VALUE_RE.search(value):
                raise RuntimeError("invalid header")  # its value could add headers or a response
            name = name.lower()
            if name == b"content-length":
                self.expected_content_length, self.chunked_encoding = int(value), False
            elif name == b"connection" and value.lower() == b"close":
                closes = True
            elif name == REQUEST_ID:
                is_named = True
            parts += (name, b": ", value, b"\r\n")
        if not is_named:  # answers that are not the router's own, such as those to preflights
            parts += (REQUEST_ID, b": ", request_id_of(self.scope["headers"]).encode(), b"\r\n")
        if closes:
            self.keep_alive = False
        elif not self.keep_alive:
            parts.append(b"connection: close\r\n")
        if self.chunked_encoding is None and status not in BODILESS:
            if self.scope["http_version"] == "1.0":
                self.keep_alive = self.chunked_encoding = False  # the response ends with the connection
                self.expected_content_length = -1
            else:
                self.chunked_encoding = True
                parts.append(b"transfer-encoding: chunked\r\n")
        parts.append(b"\r\n")
        self._head = b"".join(parts)
        self.response_started = True
        self.waiting_for_100_continue = False

    def _write_body(self, message: HTTPResponseBodyEvent) -> None:
        body, more = message.get("body", b""), message.get("more_body", False)
        head, self._head = self._head, b""
        if self.scope["method"] == "HEAD":
            data, self.expected_content_length = head, 0
        elif self.chunked_encoding:
            data = b"%b%x\r\n%b\r\n" % (head, len(body), body) if body else head
            if not more:
                data += b"0\r\n\r\n"
        else:
            data = head + body if head else body
            if self.expected_content_length >= 0:
                self.expected_content_length -= len(body)
                if self.expected_content_length < 0 or (self.expected_content_length and not more):
                    self._head = head
                    raise RuntimeError("the body is not as long as content-length says")
            elif not more:
                self.expected_content_length = 0
        if data:
            self.transport.write(data)
        if not more:
            self._complete()

    def _complete(self) -> None:
        self.response_complete = True
        self._gone = None
        self.message_event.set()
        self.on_response()


def _nothing() -> None:
    """Called after the application has ended."""

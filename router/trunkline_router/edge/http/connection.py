"""One HTTP/1.1 connection: parses requests with httptools, with limits on everything that a client sends.

A connection answers one request at a time. If a client sends the next one before it has read the response, it gets that
response and no other: the connection then closes, and clients that send requests ahead repeat those on another one.
"""

import asyncio
import urllib.parse
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from enum import Enum
from math import inf
from typing import Any, cast

import httptools

from trunkline.status import RequestRefused
from trunkline_router.access.gate.places import Place, Places, Sender
from trunkline_router.address import network_of
from trunkline_router.edge.http.exchange import Exchange
from trunkline_router.edge.http.headers import request_id_of
from trunkline_router.edge.http.limits import NOT_HTTP, HttpLimits, Refused
from trunkline_router.record.error_statuses import Header
from trunkline_router.record.refused_calls import RefusedCalls

HIGH_WATER_BYTES = 16 << 10  # of output that waits in the process; beyond it the application waits
CHUNK_FRAMING_BYTES = 12  # a size of up to 8 digits and two line ends
CHECKED = frozenset({b"content-length", b"expect", b"transfer-encoding", b"content-encoding"})  # headers


@dataclass(slots=True)
class Shared:
    """What the connections of a server share.

    places: of connections. Those on which no request is being answered may be given up.
    now_s: a clock in seconds
    refused: is told of what connections refuse
    tasks: the running calls of the application
    """

    app: Callable[..., Awaitable[None]]
    limits: HttpLimits
    places: Places
    now_s: Callable[[], float]
    refused: RefusedCalls
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    connections: set["Connection"] = field(default_factory=set)
    all_closed: asyncio.Event = field(default_factory=asyncio.Event)  # there is no connection
    date_line: bytes = b""  # a response header


def sender_at(client: tuple[str, int]) -> Sender:
    """The holder of a connection's place, by its address and port."""
    return Sender(network_of(client[0]), f"{client[0]} {client[1]}")


class Phase(Enum):
    """What the parser waits for."""

    IDLE = "a request"
    HEAD = "the rest of a request's headers"
    BODY = "the rest of a request's body"


class Connection(asyncio.Protocol):
    """There are no timers: the server calls overdue() once in a while, which takes less time than a timer per request.
    A client that takes no output is the kernel's matter (server.py).
    """

    def __init__(self, shared: Shared) -> None:
        self.shared, self._limits = shared, shared.limits
        self.transport: asyncio.Transport
        self.client: tuple[str, int] | None = None
        self._scheme = "http"
        self._place: Place | None = None
        self._parser = httptools.HttpRequestParser(self)
        self._exchange: Exchange | None = None  # until its body has arrived and its response is complete
        self._is_ending = self._ignores_input = self._is_reading_paused = False
        self.is_writing_paused = False  # output waits for the client to read
        self._writable = asyncio.Event()
        self._phase, self._due_s = Phase.IDLE, inf
        # Of the request that arrives
        self._url = b""
        self._headers: list[Header] = []
        self._head_bytes = self._num_headers = self._body_bytes = self._num_chunks = 0
        self._fed_bytes = 0  # to the parser, after the read in which the request began
        self._is_upgrade = False

    def is_busy(self) -> bool:
        """Whether a request is being answered whose body has arrived. A response that is complete and not read does not
        count: reading nothing must not keep a connection open.
        """
        exchange = self._exchange
        return exchange is not None and not exchange.more_body

    def drop(self) -> None:
        """Closes the connection at once."""
        self._uncount()
        self.transport.abort()

    def overdue(self, now_s: float) -> None:
        """Ends the connection if the client has taken too long."""
        if now_s < self._due_s:
            return
        if self._is_ending:
            self.drop()
        elif self.is_writing_paused or self.is_busy():
            return
        elif self._is_reading_paused:
            self._due_s = now_s + self._limits.body_s  # it is the handler that does not take the body
        elif self._phase is Phase.HEAD:
            self._refuse(Refused(408, f"the headers did not arrive within {self._limits.head_s:g} s"))
        elif self._phase is Phase.BODY:
            self._refuse(Refused(408, f"the body did not arrive within {self._limits.body_s:g} s"))
        else:
            self._end()

    def shutdown(self) -> None:
        """Closes the connection, after the response that is being sent."""
        if self._exchange is not None and not self._exchange.is_complete:
            self._exchange.keeps_alive = False
        elif not self._is_ending:
            self._end()

    # The transport's calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Counts the connection, or drops it if there are too many."""
        self.transport = cast("asyncio.Transport", transport)
        self.transport.set_write_buffer_limits(high=HIGH_WATER_BYTES)
        if client := transport.get_extra_info("peername"):
            self.client = client[0], client[1]
        if transport.get_extra_info("sslcontext") is not None:
            self._scheme = "https"
        self._enter(Phase.IDLE, self._limits.head_s)
        try:
            self._place = self.shared.places.take(sender_at(self.client or ("", 0)), lambda _: self.drop())
        except RequestRefused:
            self.drop()
            return
        self.shared.places.loosen(self._place)
        self.shared.connections.add(self)
        self.shared.all_closed.clear()

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends the work for the connection."""
        self._client_gone()
        self._uncount()
        self.is_writing_paused = False
        self._writable.set()
        self._is_ending = self._ignores_input = True
        del self._parser  # breaks a cycle

    def eof_received(self) -> None:
        """The client closes. Whatever it may still read, it is gone."""
        self._client_gone()

    def data_received(self, data: bytes) -> None:
        """Parses what has arrived. What must be ignored is read all the same: otherwise it would hide that the client
        goes."""
        if self._ignores_input:
            return
        self._fed_bytes += len(data)
        try:
            self._feed(data)
            if self._phase is not Phase.IDLE:
                self._check_unfinished()
        except Refused as refused:
            self._refuse(refused)
        except httptools.HttpParserError as error:
            found = error.__context__  # what a callback has raised
            self._refuse(found if isinstance(found, Refused) else Refused(400, NOT_HTTP))

    def pause_writing(self) -> None:
        """The client does not read fast enough."""
        self.is_writing_paused = True
        self._writable.clear()

    def resume_writing(self) -> None:
        """The client has read most of what was written."""
        self.is_writing_paused = False
        self._writable.set()
        if self._exchange is None and not self._is_ending:
            self._enter(Phase.IDLE, self._limits.keep_alive_s)

    async def drained(self) -> None:
        """Returns once the client has read most of what was written, or has gone."""
        await self._writable.wait()

    def _pause_reading(self) -> None:
        if not self._is_reading_paused:
            self._is_reading_paused = True
            self.transport.pause_reading()

    def resume_reading(self) -> None:
        """The handler takes what has arrived of the body."""
        if self._is_reading_paused:
            self._is_reading_paused = False
            self.transport.resume_reading()

    def _client_gone(self) -> None:
        exchange, self._exchange = self._exchange, None
        if exchange is not None and not exchange.is_complete:
            self._may_be_given_up()
            exchange.client_gone()

    def _uncount(self) -> None:
        if self._place is not None:
            self.shared.places.release(self._place)
            self._place = None  # it refers to the connection: a cycle
        self.shared.connections.discard(self)
        if not self.shared.connections:
            self.shared.all_closed.set()

    def _may_be_given_up(self) -> None:
        if self._place is not None:
            self.shared.places.loosen(self._place)

    def _feed(self, data: bytes) -> None:
        while True:
            try:
                self._parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                # A server may ignore Upgrade. Java's client asks for HTTP/2 with every request, even one with a body,
                # which httptools does not parse. So a new parser gets the same request without that header.
                self._is_upgrade = False
                data = self._head_without_upgrade() + data[upgrade.args[0] :]
                self._parser = httptools.HttpRequestParser(self)

    def _head_without_upgrade(self) -> bytes:
        version = self._parser.get_http_version().encode()
        kept = [b"%b: %b\r\n" % header for header in self._headers if header[0] != b"upgrade"]
        return b"%b %b HTTP/%b\r\n%b\r\n" % (self._parser.get_method(), self._url, version, b"".join(kept))

    def _check_unfinished(self) -> None:
        """The parser collects an unfinished header or trailer and says nothing of it or of chunk extensions. Raises
        Refused if too much of the request is neither body nor accounted for by its chunks."""
        most = 2 * (self._limits.max_url_bytes + self._limits.max_header_bytes) + CHUNK_FRAMING_BYTES * self._num_chunks
        if self._fed_bytes - self._body_bytes > most:
            raise self._too_large_headers()

    # The parser's calls

    def on_message_begin(self) -> None:
        self._url, self._headers = b"", []
        self._head_bytes = self._num_headers = self._body_bytes = self._num_chunks = self._fed_bytes = 0
        self._enter(Phase.HEAD, self._limits.head_s)
        if self._exchange is not None or self.is_writing_paused:
            raise Refused(400, "the response to the request before must be read first")

    def on_url(self, url: bytes) -> None:
        self._url += url
        if len(self._url) > self._limits.max_url_bytes:
            raise Refused(414, f"a request's target has at most {self._limits.max_url_bytes} bytes")

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header or a trailer."""
        self._num_headers += 1
        self._head_bytes += len(name) + len(value)
        if self._num_headers > self._limits.max_headers or self._head_bytes > self._limits.max_header_bytes:
            raise self._too_large_headers()
        if self._phase is Phase.HEAD:  # trailers are ignored: they must not pass for headers
            self._headers.append((name.lower(), value.rstrip(b" \t")))  # the parser strips leading blanks alone

    def on_headers_complete(self) -> None:
        method = self._parser.get_method()
        self._is_upgrade = self._parser.should_upgrade() and method != b"CONNECT"
        if self._is_upgrade:
            return
        version = self._parser.get_http_version()
        expects_continue = self._check_headers(method, version)
        scope = self._scope(method.decode("ascii"), version)
        keeps_alive = version == "1.1" and self._parser.should_keep_alive()
        self._exchange = Exchange(self, scope, keeps_alive=keeps_alive, expects_continue=expects_continue)
        self._enter(Phase.BODY, self._limits.body_s)
        task = self._exchange.task = asyncio.get_running_loop().create_task(self._exchange.run(self.shared.app))
        self.shared.tasks.add(task)
        task.add_done_callback(self.shared.tasks.discard)

    def on_chunk_header(self) -> None:
        self._num_chunks += 1
        if self._num_chunks > self._limits.max_chunks:
            raise Refused(413, f"a body has at most {self._limits.max_chunks} chunks")

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        if self._body_bytes > self._limits.max_body_bytes:
            raise self._too_large_body()
        if self._exchange is not None and not self._exchange.body_arrived(body):
            self._pause_reading()

    def on_message_complete(self) -> None:
        if self._is_upgrade:
            return
        self._enter(Phase.IDLE, self._limits.keep_alive_s)
        exchange = self._exchange
        if exchange is None:
            return
        exchange.body_ended()
        if exchange.is_complete:
            self._exchange = None
        elif self._place is not None:
            self.shared.places.keep(self._place)

    def _check_headers(self, method: bytes, version: str) -> bool:
        """Returns whether the client gets 100 Continue. Raises Refused for a request that this server cannot
        understand or does not take."""
        hosts, expects_continue = 0, False
        for name, value in self._headers:
            if name == b"host":
                hosts += 1
            elif name in CHECKED:
                self._check_header(name, value.lower())
                expects_continue = expects_continue or name == b"expect"
        if version not in ("1.0", "1.1"):
            raise Refused(400, "only HTTP/1.1 and HTTP/1.0 are supported")
        if hosts > 1 or (not hosts and version == "1.1"):
            raise Refused(400, "a request must have one Host header")
        if method == b"CONNECT":
            raise Refused(400, "CONNECT is not supported: this is not a proxy")
        return expects_continue and version == "1.1"  # HTTP/1.0 has no informational responses

    def _check_header(self, name: bytes, value: bytes) -> None:
        if name == b"content-length":
            if int(value) > self._limits.max_body_bytes:
                raise self._too_large_body()
        elif name == b"expect":
            if value != b"100-continue":
                raise Refused(417, "of Expect, only 100-continue is supported")
        elif name == b"transfer-encoding":
            if value != b"chunked":
                raise Refused(501, "of Transfer-Encoding, only chunked is supported")
        elif value not in (b"", b"identity"):
            raise Refused(415, "a request's body must not be compressed: Content-Encoding is not supported")

    def _scope(self, method: str, version: str) -> dict[str, Any]:
        """Returns the request as ASGI describes it. Raises Refused."""
        if self._url.startswith(b"/"):
            raw_path, _, query = self._url.partition(b"?")
        else:
            try:
                url = httptools.parse_url(self._url)
            except httptools.HttpParserInvalidURLError:
                raise Refused(400, "the request's target is not valid") from None
            raw_path, query = url.path or b"/", url.query or b""
        path = raw_path.decode("ascii")
        return {
            "type": "http",
            "http_version": version,
            "client": self.client,
            "scheme": self._scheme,
            "headers": self._headers,
            "method": method,
            "path": urllib.parse.unquote(path) if "%" in path else path,
            "query_string": query,
        }

    def _too_large_headers(self) -> Refused:
        return Refused(
            431,
            f"a request has at most {self._limits.max_headers} headers and trailers of "
            f"{self._limits.max_header_bytes} bytes in all, and short chunk extensions",
        )

    def _too_large_body(self) -> Refused:
        return Refused(413, f"a request's body has at most {self._limits.max_body_bytes} bytes")

    # Responses

    def response_complete(self) -> None:
        """Goes on with the next request, or with the rest of the body, which is discarded."""
        exchange = self._exchange
        self._may_be_given_up()
        if exchange is None or self._is_ending or self.transport.is_closing():
            return
        if not exchange.more_body:
            self._exchange = None
        if not exchange.keeps_alive:
            self._end()
            return
        if exchange.more_body:
            self._enter(Phase.BODY, self._limits.body_s)
        else:
            self._enter(Phase.IDLE, self._limits.keep_alive_s)
        self.resume_reading()

    def _refuse(self, refused: Refused) -> None:
        """Ends the connection, with the refusal if that cannot be taken for the answer to another request."""
        exchange, self._ignores_input = self._exchange, True
        if exchange is not None and not exchange.more_body:
            exchange.keeps_alive = False  # the client has sent something behind the request that is being answered
            return
        if self.is_writing_paused or (exchange is not None and exchange.is_complete):
            self._end()
            return
        if exchange is not None:
            self._client_gone()
            if exchange.has_sent:
                self.drop()
                return
        target, headers, method = b"", [], ""
        if self._phase is not Phase.IDLE:
            target, headers = self._url, self._headers
        if target:  # the parser reads the method before it
            method = self._parser.get_method().decode("ascii")
        request_id = request_id_of(headers)
        self.transport.write(refused.response(target, request_id))
        scope = {"scheme": self._scheme, "client": self.client, "headers": headers, "method": method}
        self.shared.refused.note(refused.call(scope, target, request_id))
        self._end()

    def _end(self) -> None:
        """Closes the connection when the client has read what is written."""
        self._is_ending = self._ignores_input = True
        if self._phase is Phase.IDLE or not self.transport.can_write_eof():
            self._due_s = inf
            self.transport.close()
            return
        # The client may be sending: closing would reset the connection, and the response could be lost.
        limit_s = self._limits.unread_s if self.is_writing_paused else self._limits.linger_s
        self._due_s = self.shared.now_s() + limit_s
        self.resume_reading()
        try:
            self.transport.write_eof()
        except OSError:  # the client has reset the connection, which the event loop reports a moment later
            self.drop()

    def _enter(self, phase: Phase, limit_s: float) -> None:
        self._phase, self._due_s = phase, self.shared.now_s() + limit_s

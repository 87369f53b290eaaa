"""One HTTP/1.1 connection: parses requests with httptools, with limits on everything that a client sends.

httptools parses all that was read at once. If a callback raises Refused, the parser stops for good: earlier requests
are still answered, then the refusal is sent, and the connection closes.
"""

import asyncio
import urllib.parse
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from enum import Enum
from math import inf
from typing import Any, cast

import httptools

from trunkline_router.address import network_of
from trunkline_router.edge.http.connections import Connections
from trunkline_router.edge.http.exchange import Exchange
from trunkline_router.edge.http.headers import request_id_of
from trunkline_router.edge.http.limits import NOT_HTTP, HttpLimits, Refused
from trunkline_router.record.error_statuses import Header
from trunkline_router.record.refused_calls import RefusedCalls

HIGH_WATER_BYTES = 16 << 10  # of output that waits in the process; beyond it the application waits
UNPARSED_BYTES = 64 << 10  # kept of later requests while one is being answered; with more of them they are refused
CHUNK_FRAMING_BYTES = 12  # a size of up to 8 digits and two line ends
ASGI = {"version": "3.0", "spec_version": "2.3"}
CHECKED = frozenset({b"content-length", b"expect", b"transfer-encoding", b"content-encoding"})  # headers


@dataclass(slots=True)
class Shared:
    """What the connections of a server share.

    now_s: a clock in seconds
    refused: is told of what connections refuse
    tasks: the running calls of the application
    """

    app: Callable[..., Awaitable[None]]
    limits: HttpLimits
    connections: Connections
    now_s: Callable[[], float]
    refused: RefusedCalls
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    date_line: bytes = b""  # a response header


class Phase(Enum):
    """What the parser waits for."""

    IDLE = "a request"
    HEAD = "the rest of a request's headers"
    BODY = "the rest of a request's body"


class Connection(asyncio.Protocol):
    """Requests are answered one after the other. What a client sends meanwhile is kept unparsed.

    There are no timers: the server calls overdue() once in a while, which takes less time than a timer per request. A
    client that takes no output is the kernel's matter (server.py).
    """

    def __init__(self, shared: Shared) -> None:
        self.shared, self._limits = shared, shared.limits
        self.transport: asyncio.Transport
        self.client: tuple[str, int] | None = None
        self.host = ""
        self._server: tuple[str, int] | None = None
        self._scheme = "http"
        self._parser = httptools.HttpRequestParser(self)
        self._answering: Exchange | None = None  # whose handler runs
        self._waiting: list[Exchange] = []  # pipelined ones
        self._arriving: Exchange | None = None  # whose body is being parsed
        self._unparsed = bytearray()
        self._refused: Refused | None = None
        self._is_ending = self._is_reading_paused = False
        self.is_writing_paused = False  # output waits for the client to read
        self._writable = asyncio.Event()
        self._phase, self._due_s = Phase.IDLE, inf
        # Of the request that arrives
        self._url = b""
        self._headers: list[Header] = []
        self._head_bytes = self._num_headers = self._body_bytes = self._num_chunks = 0
        self._fed_bytes = 0  # to the parser
        self._has_begun = False  # in the bytes that are being parsed
        self._is_upgrade = False

    def is_busy(self) -> bool:
        """Whether a request is being answered whose body has arrived. A response that is complete and not read does not
        count, nor do requests that wait for the client to read it: reading nothing must not keep a connection open.
        """
        answering = self._answering
        return answering is not None and (not answering.more_body or bool(self._waiting))

    def _keeps_unparsed(self) -> bool:
        return self.is_writing_paused if self._answering is None else self.is_busy()

    def drop(self) -> None:
        """Closes the connection at once."""
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
        self._waiting.clear()
        if self._answering is not None:
            self._answering.keeps_alive = False
        elif not self._is_ending:
            self._end()

    # The transport's calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Counts the connection, or drops it if there are too many."""
        self.transport = cast("asyncio.Transport", transport)
        self.transport.set_write_buffer_limits(high=HIGH_WATER_BYTES)
        client, server = transport.get_extra_info("peername"), transport.get_extra_info("sockname")
        self.client, self._server = client and (client[0], client[1]), server and (server[0], server[1])
        self.host = network_of(self.client[0]) if self.client else ""
        if transport.get_extra_info("sslcontext") is not None:
            self._scheme = "https"
        self._enter(Phase.IDLE, self._limits.head_s)
        if not self.shared.connections.add(self):
            self.drop()

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends the work for the connection."""
        self.shared.connections.remove(self)
        self._client_gone()
        self._unparsed.clear()
        self.is_writing_paused = False
        self._writable.set()
        self._is_ending = True
        del self._parser  # breaks a cycle

    def eof_received(self) -> None:
        """The client closes. Whatever it may still read, it is gone."""
        self._client_gone()

    def data_received(self, data: bytes) -> None:
        """Parses what has arrived, or keeps it while a request is being answered."""
        if self._is_ending or self._refused is not None:
            return
        if not self._keeps_unparsed():
            self._parse(data)
            return
        if len(self._unparsed) + len(data) <= UNPARSED_BYTES:
            self._unparsed += data
        else:  # what follows is read and discarded: otherwise it would hide that the client goes
            self._unparsed.clear()
            self._refuse(self._too_much_waits())

    def pause_writing(self) -> None:
        """The client does not read fast enough."""
        self.is_writing_paused = True
        self._writable.clear()

    def resume_writing(self) -> None:
        """The client has read most of what was written."""
        self.is_writing_paused = False
        self._writable.set()
        if self._answering is None and not self._is_ending:
            self._go_on()

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
        self._waiting.clear()
        answering, self._answering = self._answering, None
        if answering is not None:
            self.shared.connections.used(self)
            answering.client_gone()

    def _parse(self, data: bytes) -> None:
        self._has_begun = False
        try:
            self._feed(data)
            if self._phase is not Phase.IDLE:
                self._check_unfinished(len(data))
        except Refused as refused:
            self._refuse(refused)
        except httptools.HttpParserError as error:
            found = error.__context__  # what a callback has raised
            self._refuse(found if isinstance(found, Refused) else Refused(400, NOT_HTTP))

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

    def _check_unfinished(self, num_bytes: int) -> None:
        """The parser collects an unfinished header or trailer and says nothing of it or of chunk extensions. Raises
        Refused if too much of the request is neither body nor accounted for by its chunks."""
        if self._has_begun:
            self._fed_bytes = self._body_bytes  # how many came before it is not known, nor how many are its head's
            return
        self._fed_bytes += num_bytes
        most = 2 * (self._limits.max_url_bytes + self._limits.max_header_bytes) + CHUNK_FRAMING_BYTES * self._num_chunks
        if self._fed_bytes - self._body_bytes > most:
            raise self._too_large_headers()

    # The parser's calls

    def on_message_begin(self) -> None:
        self._url, self._headers = b"", []
        self._head_bytes = self._num_headers = self._body_bytes = self._num_chunks = 0
        self._has_begun = True
        self._enter(Phase.HEAD, self._limits.head_s)

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
        exchange = Exchange(self, scope, keeps_alive=keeps_alive, expects_continue=expects_continue)
        self._arriving = exchange
        self._enter(Phase.BODY, self._limits.body_s)
        if self._answering is None:
            self._answer(exchange)
        elif len(self._waiting) < self._limits.max_pipelined:
            self._waiting.append(exchange)
        else:
            raise Refused(400, f"at most {self._limits.max_pipelined} requests may wait for an earlier one's response")

    def on_chunk_header(self) -> None:
        self._num_chunks += 1
        if self._num_chunks > self._limits.max_chunks:
            raise Refused(413, f"a body has at most {self._limits.max_chunks} chunks")

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        if self._body_bytes > self._limits.max_body_bytes:
            raise self._too_large_body()
        if self._arriving is not None and not self._arriving.body_arrived(body):
            if self._arriving in self._waiting:
                raise self._too_much_waits()
            self._pause_reading()

    def on_message_complete(self) -> None:
        if self._is_upgrade:
            return
        self._enter(Phase.IDLE, self._limits.keep_alive_s)
        if self._arriving is not None:
            self._arriving.body_ended()
            self._arriving = None

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
            "asgi": ASGI,
            "http_version": version,
            "server": self._server,
            "client": self.client,
            "scheme": self._scheme,
            "root_path": "",
            "headers": self._headers,
            "method": method,
            "path": urllib.parse.unquote(path) if "%" in path else path,
            "raw_path": raw_path,
            "query_string": query,
        }

    def _too_large_headers(self) -> Refused:
        return Refused(
            431,
            f"a request has at most {self._limits.max_headers} headers and trailers of "
            f"{self._limits.max_header_bytes} bytes in all, and short chunk extensions",
        )

    def _too_much_waits(self) -> Refused:
        return Refused(400, f"at most {UNPARSED_BYTES >> 10} KiB of requests may wait for an earlier one's response")

    def _too_large_body(self) -> Refused:
        return Refused(413, f"a request's body has at most {self._limits.max_body_bytes} bytes")

    # Responses

    def _answer(self, exchange: Exchange) -> None:
        self._answering = exchange
        self.shared.connections.used(self)
        task = asyncio.get_running_loop().create_task(exchange.run(self.shared.app))
        self.shared.tasks.add(task)
        task.add_done_callback(self.shared.tasks.discard)

    def response_complete(self) -> None:
        """Goes on with the next request."""
        answered, self._answering = self._answering, None
        self.shared.connections.used(self)
        if answered is None or self._is_ending or self.transport.is_closing():
            return
        if answered.keeps_alive:
            self._go_on()
        else:
            self._end()

    def _go_on(self) -> None:
        """Answers the next request, or reads it. A client that does not read the responses gets no further ones."""
        if self.is_writing_paused:
            return  # resume_writing() comes back to it
        limit_s = self._limits.keep_alive_s if self._phase is Phase.IDLE else self._limits.head_s
        self._due_s = self.shared.now_s() + limit_s
        if self._waiting:
            self._answer(self._waiting.pop(0))
        elif self._refused is not None:
            self._refuse(self._refused)
        if not self._keeps_unparsed():
            unparsed = bytes(self._unparsed)
            self._unparsed.clear()
            self.resume_reading()
            if unparsed:
                self.data_received(unparsed)

    def _refuse(self, refused: Refused) -> None:
        """Sends the refusal and ends the connection, after the responses to complete requests."""
        self._refused = refused
        if self._phase is Phase.BODY and self._arriving is not None and self._arriving.is_complete:
            self._end()  # a second response could be taken for the next request's
            return
        if self._waiting and self._waiting[-1].more_body:
            self._waiting.pop()
        answering = self._answering
        if self._keeps_unparsed():
            return  # _go_on() comes back to it
        if answering is not None:
            self._client_gone()
            if answering.has_sent:
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
        self._is_ending = True
        self._unparsed.clear()
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

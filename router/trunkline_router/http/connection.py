"""One HTTP/1.1 connection: uvicorn's protocol on httptools, with limits on everything that a client sends.

httptools parses all that was read at once. A limit that is exceeded within it raises Refused in a callback, which stops
the parser for good: earlier requests are still answered, then the refusal is sent, and the connection closes.
"""

import asyncio
import urllib.parse
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from http import HTTPStatus
from typing import NoReturn, cast

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from trunkline_router.http.connections import Connections
from trunkline_router.http.disconnect import ON_DISCONNECT
from trunkline_router.http.errors import protocol_body
from trunkline_router.http.exchange import Exchange
from trunkline_router.http.json_body import HAS_BODY
from trunkline_router.http.limits import HttpLimits

HIGH_WATER_BYTES = 16 << 10  # of output that waits in the process; beyond it the application waits
UNPARSED_BYTES = 64 << 10  # kept of later requests while one is being answered; beyond it nothing is read
MAX_CHUNKS = 1 << 16  # of one body: each costs some microseconds, even if it is of one byte
CHUNK_FRAMING_BYTES = 12  # a size of up to 8 digits and two line ends
NOT_HTTP = "not a valid HTTP/1.1 request"


class Refused(Exception):
    """What the client sent is refused, and its connection closes."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message

    def response(self, target: bytes) -> bytes:
        """The whole response.  target: of the request, as far as it is known"""
        body = protocol_body(self.status, self.message, target.decode("latin-1"))
        return (
            b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b"
        ) % (self.status, HTTPStatus(self.status).phrase.encode(), len(body), body)


@dataclass(slots=True)
class Shared:
    """What the connections of a server share."""

    config: Config
    limits: HttpLimits
    connections: Connections
    now_s: Callable[[], float]
    state: ServerState = field(default_factory=ServerState)


class Phase(Enum):
    """What the parser waits for."""

    IDLE = "a request"
    HEAD = "the rest of a request's headers"
    BODY = "the rest of a request's body"


class Connection(HttpToolsProtocol):
    """Requests are answered one after the other. What a client sends meanwhile is kept unparsed.

    There are no timers: the server calls overdue() once in a while, which takes less time than a timer per request.
    """

    def __init__(self, shared: Shared) -> None:
        super().__init__(shared.config, shared.state, {})
        self._shared = shared
        self._limits = shared.limits
        self.host = ""
        self._answering: Exchange | None = None  # whose handler runs; `self.cycle` is the one parsed last
        self._waiting: list[Exchange] = []  # pipelined ones
        self._unparsed = bytearray()
        self._refused: Refused | None = None
        self.url = b""  # of the request that arrives
        self._is_ending = self._is_upgrade = False
        self._phase, self._due_s = Phase.IDLE, 0.0
        self._head_bytes = self._num_headers = self._body_bytes = self._num_chunks = 0
        self._has_begun = False  # in the bytes that are being parsed: the request that arrives
        self._fed_bytes = 0  # of that request

    def is_busy(self) -> bool:
        """Whether the client waits for a response, and not the other way round."""
        answering = self._answering
        return answering is not None and (not answering.more_body or bool(self._waiting))

    def drop(self) -> None:
        """Closes the connection at once."""
        self.transport.abort()

    def overdue(self, now_s: float) -> None:
        """Ends the connection if the client has taken too long."""
        if now_s < self._due_s or (self.is_busy() and not self._is_ending):
            return
        if self._is_ending:
            self.transport.abort()
        elif self.flow.read_paused:
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
        if self._answering is None:
            self._end()
        else:
            self._answering.keep_alive = False

    # The transport's calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Counts the connection, or drops it if there are too many."""
        super().connection_made(cast("asyncio.Transport", transport))
        self.transport.set_write_buffer_limits(high=HIGH_WATER_BYTES)
        self.host = self.client[0] if self.client else ""
        self._enter(Phase.IDLE, self._limits.head_s)
        if not self._shared.connections.add(self):
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends the work for the connection."""
        self._shared.connections.remove(self)
        self._client_gone()
        self._unparsed.clear()
        super().connection_lost(exc)

    def eof_received(self) -> None:
        """The client closes. Whatever it may still read, it is gone."""
        self._client_gone()

    def data_received(self, data: bytes) -> None:
        """Parses what has arrived, or keeps it while a request is being answered."""
        if self._is_ending or self._refused is not None:
            return
        if self.is_busy():
            self._unparsed += data
            if len(self._unparsed) > UNPARSED_BYTES:
                self.flow.pause_reading()
        else:
            self._parse(data)

    def _client_gone(self) -> None:
        self._waiting.clear()
        answering, self._answering = self._answering, None
        if answering is not None:
            answering.client_gone()

    def _parse(self, data: bytes) -> None:
        self._has_begun = False
        try:
            self._feed(data)
        except httptools.HttpParserError:
            self._refuse(self._refused or Refused(400, NOT_HTTP))
            return
        if self._phase is not Phase.IDLE:
            self._check_framing(len(data))

    def _check_framing(self, num_bytes: int) -> None:
        """Refuses the request if too much of it is neither body nor accounted for by its chunks.  num_bytes: parsed
        just now, if it had begun before

        httptools collects an unfinished header or trailer and says nothing of it or of chunk extensions.
        """
        if self._has_begun:
            self._fed_bytes = self._body_bytes  # how many came before it is not known, nor how many are its head's
            return
        self._fed_bytes += num_bytes
        most = 2 * (self._limits.max_url_bytes + self._limits.max_header_bytes) + CHUNK_FRAMING_BYTES * self._num_chunks
        if self._fed_bytes - self._body_bytes > most:
            self._refuse(Refused(431, self._headers_problem()))

    def _feed(self, data: bytes) -> None:
        while True:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                # A server may ignore Upgrade. Java's client asks for HTTP/2 with every request, even one with a body,
                # which httptools does not parse. So a new parser gets the same request without that header.
                self._is_upgrade = False
                data = self._head_without_upgrade() + data[upgrade.args[0] :]
                self.parser = httptools.HttpRequestParser(self)

    def _head_without_upgrade(self) -> bytes:
        version = self.parser.get_http_version().encode()
        first = b"%b %b HTTP/%b\r\n" % (self.parser.get_method(), self.url, version)
        headers = [b"%b: %b\r\n" % header for header in self.headers if header[0] != b"upgrade"]
        return b"".join([first, *headers, b"\r\n"])

    # The parser's calls

    def on_message_begin(self) -> None:
        self._head_bytes = self._num_headers = self._body_bytes = self._num_chunks = 0
        self._has_begun = True
        self._enter(Phase.HEAD, self._limits.head_s)
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        if len(self.url) > self._limits.max_url_bytes:
            self._stop(414, f"a request's target has at most {self._limits.max_url_bytes} bytes")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_headers += 1
        self._head_bytes += len(name) + len(value)
        if self._num_headers > self._limits.max_headers or self._head_bytes > self._limits.max_header_bytes:
            self._stop(431, self._headers_problem())
        if self._phase is Phase.HEAD:  # trailers are ignored: they must not pass for headers
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._is_upgrade = self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"
        if self._is_upgrade:
            return
        self._check_head()
        exchange = self.cycle = self._exchange()
        self._enter(Phase.BODY, self._limits.body_s)
        if self._answering is None:
            self._answer(exchange)
        elif len(self._waiting) < self._limits.max_pipelined:
            self._waiting.append(exchange)
        else:
            self._stop(400, f"at most {self._limits.max_pipelined} requests may wait for an earlier one's response")

    def on_chunk_header(self) -> None:
        self._num_chunks += 1
        if self._num_chunks > MAX_CHUNKS:
            self._stop(413, f"a body has at most {MAX_CHUNKS} chunks")

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        if self._body_bytes > self._limits.max_body_bytes:
            self._stop(413, self._body_problem())
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._is_upgrade:
            return
        self._enter(Phase.IDLE, self._limits.keep_alive_s)
        super().on_message_complete()

    def _check_head(self) -> None:
        """Raises Refused for a request that this server cannot understand or does not take."""
        hosts = 0
        for name, value in self.headers:
            if name == b"content-length" and int(value) > self._limits.max_body_bytes:
                self._stop(413, self._body_problem())
            elif name == b"expect" and not self.expect_100_continue:
                self._stop(417, "of Expect, only 100-continue is supported")
            hosts += name == b"host"
        version = self.parser.get_http_version()
        if version not in ("1.0", "1.1"):
            self._stop(400, "only HTTP/1.1 and HTTP/1.0 are supported")
        if hosts > 1 or (not hosts and version == "1.1"):
            self._stop(400, "a request must have one Host header")
        if self.parser.get_method() == b"CONNECT":
            self._stop(400, "CONNECT is not supported: this is not a proxy")

    def _exchange(self) -> Exchange:
        try:
            url = httptools.parse_url(self.url)
        except httptools.HttpParserInvalidURLError:
            self._stop(400, "the request's target is not valid")
        scope, version = self.scope, self.parser.get_http_version()
        raw_path = url.path or b"/"
        path = raw_path.decode("ascii")
        scope["method"], scope["http_version"] = self.parser.get_method().decode("ascii"), version
        scope["path"] = urllib.parse.unquote(path) if "%" in path else path
        scope["raw_path"], scope["query_string"] = raw_path, url.query or b""
        is_last = version == "1.0" or not self.parser.should_keep_alive()
        exchange = Exchange(
            scope=scope,
            transport=self.transport,
            flow=self.flow,
            logger=self.logger,
            access_logger=self.access_logger,
            access_log=False,
            default_headers=self.server_state.default_headers,
            message_event=asyncio.Event(),
            expect_100_continue=self.expect_100_continue,
            keep_alive=not is_last,
            on_response=self.on_response_complete,
        )
        cast("dict[str, object]", scope)["extensions"] = {
            ON_DISCONNECT: exchange.on_disconnect,
            HAS_BODY: exchange.has_whole_body,
        }
        return exchange

    # Responses

    def _answer(self, exchange: Exchange) -> None:
        self._answering = exchange
        self._shared.connections.used(self)
        self._start_asgi_task(exchange, self.app)

    def on_response_complete(self) -> None:
        """Goes on with the next request."""
        answered, self._answering = self._answering, None
        if answered is None or self._is_ending or self.transport.is_closing():
            return
        self._due_s = self._shared.now_s() + (
            self._limits.keep_alive_s if self._phase is Phase.IDLE else self._limits.head_s
        )
        if not answered.keep_alive:
            self._end()
        elif self._waiting:
            self._answer(self._waiting.pop(0))
        elif self._refused is not None:
            self._refuse(self._refused)
        if self._answering is None or not self.is_busy():
            unparsed, self._unparsed = self._unparsed, bytearray()
            self.flow.resume_reading()
            if unparsed:
                self.data_received(bytes(unparsed))

    def _stop(self, status: int, message: str) -> NoReturn:
        """Stops the parser in one of its calls."""
        self._refused = Refused(status, message)
        raise self._refused

    def _refuse(self, refused: Refused) -> None:
        """Sends the refusal and ends the connection, after the responses to complete requests."""
        self._refused = refused
        if self._phase is Phase.BODY and self.cycle.response_complete:
            self._end()  # a second response could be taken for the next request's
            return
        if self._waiting and self._waiting[-1].more_body:
            self._waiting.pop()
        answering = self._answering
        if answering is not None and not answering.more_body:
            return  # on_response_complete() comes back to it
        if answering is not None:
            has_begun = answering.has_sent()
            self._client_gone()
            if has_begun:
                self.transport.abort()
                return
        self.transport.write(refused.response(self.url))
        self._end()

    def _end(self) -> None:
        """Closes the connection when the client has read what is written, or after a while."""
        self._is_ending = True
        self._unparsed.clear()
        self._due_s = self._shared.now_s() + self._limits.linger_s
        if self._phase is not Phase.IDLE and self.transport.can_write_eof():
            # The client may be sending: closing would reset the connection, and the response could be lost.
            self.flow.resume_reading()
            try:
                self.transport.write_eof()
            except OSError:  # the client has reset the connection, which the event loop reports a moment later
                self.transport.abort()
        else:
            self.transport.close()

    def _enter(self, phase: Phase, limit_s: float) -> None:
        self._phase, self._due_s = phase, self._shared.now_s() + limit_s

    def _headers_problem(self) -> str:
        return (
            f"a request has at most {self._limits.max_headers} headers and trailers of {self._limits.max_header_bytes} "
            "bytes in all, and short chunk extensions"
        )

    def _body_problem(self) -> str:
        return f"a request's body has at most {self._limits.max_body_bytes} bytes"

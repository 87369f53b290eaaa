"""One HTTP/1.1 connection: uvicorn's protocol on httptools, with limits on everything that a client sends.

httptools parses all that was read at once. If a callback raises Refused, the parser stops for good: earlier requests
are still answered, then the refusal is sent, and the connection closes.
"""

import asyncio
from enum import Enum
from typing import cast

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from trunkline_router.address import network_of
from trunkline_router.edge.http.disconnect import ON_DISCONNECT
from trunkline_router.edge.http.headers import request_id_of
from trunkline_router.edge.http.json_body import HAS_BODY
from trunkline_router.edge.http.wire.exchange import Exchange
from trunkline_router.edge.http.wire.received_size import RequestSize
from trunkline_router.edge.http.wire.refused import NOT_HTTP, Refused
from trunkline_router.edge.http.wire.request_head import asks_for_upgrade, check_head, complete_scope, without_upgrade
from trunkline_router.edge.http.wire.shared import Shared
from trunkline_router.edge.http.wire.unread_output import UnreadOutput, unacknowledged_bytes

HIGH_WATER_BYTES = 16 << 10  # of output that waits in the process; beyond it the application waits
UNPARSED_BYTES = 64 << 10  # kept of later requests while one is being answered; beyond it nothing is read


class Phase(Enum):
    """What the parser waits for."""

    IDLE = "a request"
    HEAD = "the rest of a request's headers"
    BODY = "the rest of a request's body"


class Connection(HttpToolsProtocol):
    """Requests are answered one after the other. What a client sends meanwhile is kept unparsed.

    There are no timers: the server calls overdue() once in a while, which takes less time than a timer per request.
    """

    def __init__(self, shared: Shared, encrypted: asyncio.Transport | None = None) -> None:
        """encrypted: what carries the transport of connection_made(), if that one encrypts; None: it does not"""
        super().__init__(shared.config, shared.state, {})
        self._shared = shared
        self._encrypted = encrypted
        self._limits = shared.limits
        self.host = ""
        self._answering: Exchange | None = None  # whose handler runs; `self.cycle` is the one parsed last
        self._waiting: list[Exchange] = []  # pipelined ones
        self._unparsed = bytearray()
        self._refused: Refused | None = None
        self._size = RequestSize(shared.limits)
        self._unread = UnreadOutput()
        self.url = b""  # of the request that arrives
        self._is_ending = self._is_upgrade = False
        self._phase, self._due_s = Phase.IDLE, 0.0

    def is_busy(self) -> bool:
        """Whether a request is being answered whose body has arrived. A response that is complete and not read does not
        count, nor do requests that wait for the client to read it: reading nothing must not keep a connection open.
        """
        answering = self._answering
        return answering is not None and (not answering.more_body or bool(self._waiting))

    def _keeps_unparsed(self) -> bool:
        answering = self._answering
        if answering is None:
            return self.flow.write_paused
        return not answering.more_body or bool(self._waiting)

    def drop(self) -> None:
        """Closes the connection at once."""
        self.transport.abort()

    def overdue(self, now_s: float) -> None:
        """Ends the connection if the client has taken too long."""
        if self._is_ending or self.flow.write_paused:
            self._check_reading(now_s)
        elif now_s < self._due_s or self.is_busy():
            return
        elif self.flow.read_paused:
            self._due_s = now_s + self._limits.body_s  # it is the handler that does not take the body
        elif self._phase is Phase.HEAD:
            self._refuse(Refused(408, f"the headers did not arrive within {self._limits.head_s:g} s"))
        elif self._phase is Phase.BODY:
            self._refuse(Refused(408, f"the body did not arrive within {self._limits.body_s:g} s"))
        else:
            self._end()

    def _check_reading(self, now_s: float) -> None:
        num_bytes = self.transport.get_write_buffer_size() + unacknowledged_bytes(self.transport)
        if self._encrypted is not None:
            num_bytes += self._encrypted.get_write_buffer_size()
        if num_bytes:
            limit_s = self._limits.linger_s if self._is_ending else self._limits.unread_s
            waited_s = self._unread.waited_s(num_bytes, now_s)
            if not waited_s:
                self._shared.connections.used(self)
            is_late = waited_s >= limit_s
        else:
            is_late = self._is_ending and now_s >= self._due_s
        if is_late:
            self.transport.abort()

    def shutdown(self) -> None:
        """Closes the connection, after the response that is being sent."""
        self._waiting.clear()
        if self._answering is None:
            if not self._is_ending:
                self._end()
        else:
            self._answering.keep_alive = False

    # The transport's calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Counts the connection, or drops it if there are too many."""
        super().connection_made(cast("asyncio.Transport", transport))
        self.transport.set_write_buffer_limits(high=HIGH_WATER_BYTES)
        self.host = network_of(self.client[0]) if self.client else ""
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
        if self._keeps_unparsed():
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

    def resume_writing(self) -> None:
        """The client has read most of what was written."""
        super().resume_writing()
        self._unread.has_been_read()
        if self._answering is None and not self._is_ending:
            self._go_on()

    def _parse(self, data: bytes) -> None:
        self._size.before_parsing()
        try:
            self._feed(data)
            if self._phase is not Phase.IDLE:
                self._size.after_parsing(len(data))
        except Refused as refused:
            self._refuse(refused)
        except httptools.HttpParserError as error:
            found = error.__context__  # what a callback has raised
            self._refuse(found if isinstance(found, Refused) else Refused(400, NOT_HTTP))

    def _feed(self, data: bytes) -> None:
        while True:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                # A server may ignore Upgrade. Java's client asks for HTTP/2 with every request, even one with a body,
                # which httptools does not parse. So a new parser gets the same request without that header.
                self._is_upgrade = False
                data = without_upgrade(self.parser, self.url, self.headers) + data[upgrade.args[0] :]
                self.parser = httptools.HttpRequestParser(self)

    # The parser's calls

    def on_message_begin(self) -> None:
        self._size.begin()
        self._enter(Phase.HEAD, self._limits.head_s)
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._size.check_url(len(self.url))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._size.add_header(len(name) + len(value))
        if self._phase is Phase.HEAD:  # trailers are ignored: they must not pass for headers
            super().on_header(name, value.rstrip(b" \t"))  # the parser strips leading blanks alone

    def on_headers_complete(self) -> None:
        self._is_upgrade = asks_for_upgrade(self.parser)
        if self._is_upgrade:
            return
        check_head(self.parser, self.headers, self._size, expects_continue=self.expect_100_continue)
        exchange = self.cycle = self._exchange()
        self._enter(Phase.BODY, self._limits.body_s)
        if self._answering is None:
            self._answer(exchange)
        elif len(self._waiting) < self._limits.max_pipelined:
            self._waiting.append(exchange)
        else:
            raise Refused(400, f"at most {self._limits.max_pipelined} requests may wait for an earlier one's response")

    def on_chunk_header(self) -> None:
        self._size.add_chunk()

    def on_body(self, body: bytes) -> None:
        self._size.add_body(len(body))
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._is_upgrade:
            return
        self._enter(Phase.IDLE, self._limits.keep_alive_s)
        super().on_message_complete()

    def _exchange(self) -> Exchange:
        complete_scope(self.scope, self.parser, self.url)
        is_last = self.scope["http_version"] == "1.0" or not self.parser.should_keep_alive()
        exchange = Exchange(
            scope=self.scope,
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
        cast("dict[str, object]", self.scope)["extensions"] = {
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
        if answered.keep_alive:
            self._go_on()
        else:
            self._end()

    def _go_on(self) -> None:
        """Answers the next request, or reads it. A client that does not read the responses gets no further ones."""
        if self.flow.write_paused:
            return  # resume_writing() comes back to it
        self._due_s = self._shared.now_s() + (
            self._limits.keep_alive_s if self._phase is Phase.IDLE else self._limits.head_s
        )
        if self._waiting:
            self._answer(self._waiting.pop(0))
        elif self._refused is not None:
            self._refuse(self._refused)
        if not self._keeps_unparsed():
            unparsed, self._unparsed = self._unparsed, bytearray()
            self.flow.resume_reading()
            if unparsed:
                self.data_received(bytes(unparsed))

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
        target, headers = (b"", []) if self._phase is Phase.IDLE else (self.url, self.headers)
        request_id = request_id_of(headers)
        self.transport.write(refused.response(target, request_id))
        method = self.parser.get_method() if target else b""  # the parser reads it before the target
        scope = {"scheme": self.scheme, "client": self.client, "headers": headers}
        self._shared.refused.note(refused.told(scope, method, target, request_id))
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

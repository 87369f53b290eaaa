"""Limits of the HTTP server on what clients send and on how long they take, and the refusal of what is beyond them."""

from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from trunkline_router.access.gate.reading import MESSAGE_TIMEOUT_S
from trunkline_router.access.gate.request_size import MAX_REQUEST_BYTES
from trunkline_router.edge.http.headers import http_refusal
from trunkline_router.record.error_statuses import PROTOCOL, protocol_body
from trunkline_router.record.refused_calls import RefusedCall

NOT_HTTP = "not a valid HTTP/1.1 request"


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """The limits of one server. Times in seconds."""

    max_url_bytes: int = 8 << 10
    max_header_bytes: int = 32 << 10  # names and values of one request together, with its trailers
    max_headers: int = 100
    max_body_bytes: int = MAX_REQUEST_BYTES
    max_chunks: int = 1 << 16  # of one body: each costs some microseconds, even if it is of one byte
    head_s: float = 10.0  # from the first byte of a request, or from the connection's start, to the end of its headers
    body_s: float = MESSAGE_TIMEOUT_S  # from the end of the headers to the end of the body
    keep_alive_s: float = 75.0  # between requests of a connection
    unread_s: float = 60.0  # for which a client may take nothing of the output that waits for it
    linger_s: float = 10.0  # for which a client may go on sending after the response that closes its connection
    check_s: float = 1.0  # times are checked so often: a client may take that much longer


class Refused(Exception):
    """A request that the server refuses before an application sees it, or the whole of it. Its connection closes."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message

    def response(self, target: bytes, request_id: str) -> bytes:
        """The whole response.  target: of the request, as far as it is known"""
        body = protocol_body(self.status, self.message, target.decode("latin-1"), request_id)
        named = request_id.encode()
        return (
            b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\nx-request-id: %b\r\n"
            b"request-id: %b\r\nconnection: close\r\n\r\n%b"
        ) % (self.status, HTTPStatus(self.status).phrase.encode(), len(body), named, named, body)

    def call(self, scope: Mapping[str, Any], target: bytes, request_id: str) -> RefusedCall:
        """The refused call.  scope: as far as the application would get it"""
        known = {**scope, "path": target.partition(b"?")[0].decode("latin-1")}
        return http_refusal(known, PROTOCOL[self.status].code, self.status, request_id)

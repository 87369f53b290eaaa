"""A request that the server refuses before an application sees it, or the whole of it."""

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from trunkline_router.edge.http.refusal import http_refusal
from trunkline_router.record.error_statuses import PROTOCOL, protocol_body
from trunkline_router.record.refused_calls import RefusedCall

NOT_HTTP = "not a valid HTTP/1.1 request"


class Refused(Exception):
    """What the client sent is refused, and its connection closes."""

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

    def told(self, scope: Mapping[str, Any], method: bytes, target: bytes, request_id: str) -> RefusedCall:
        """What is told of it.  scope: as far as the application would get it;  method, target: as far as known"""
        path = target.partition(b"?")[0].decode("latin-1")
        known = {**scope, "method": method.decode("ascii"), "path": path}
        return http_refusal(known, PROTOCOL[self.status].code, self.status, request_id)

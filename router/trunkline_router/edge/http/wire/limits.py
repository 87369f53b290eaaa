"""Limits of the HTTP server on what clients send and on how long they take."""

from dataclasses import dataclass

from trunkline_router.access.gate.reading import MESSAGE_TIMEOUT_S
from trunkline_router.access.gate.request_size import MAX_REQUEST_BYTES


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """The limits of one server. Times in seconds."""

    max_url_bytes: int = 8 << 10
    max_header_bytes: int = 32 << 10  # names and values of one request together
    max_headers: int = 100
    max_body_bytes: int = MAX_REQUEST_BYTES
    max_pipelined: int = 16  # requests of a connection that wait for an earlier one's response
    head_s: float = 10.0  # from the first byte of a request, or from the connection's start, to the end of its headers
    body_s: float = MESSAGE_TIMEOUT_S  # from the end of the headers to the end of the body
    keep_alive_s: float = 75.0  # between requests of a connection
    unread_s: float = 60.0  # for which a client may read nothing of a response, complete or not, that waits for it
    linger_s: float = 10.0  # the same of a response after which the connection closes, and to close after it
    check_s: float = 1.0  # times are checked so often: a client may take that much longer

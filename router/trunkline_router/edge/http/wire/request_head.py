"""The head of a request: whether the server understands it, and what it says in an ASGI scope."""

import urllib.parse
from collections.abc import Iterable

import httptools
from uvicorn._types import HTTPScope

from trunkline_router.edge.http.wire.received_size import RequestSize
from trunkline_router.edge.http.wire.refused import Refused
from trunkline_router.record.error_statuses import Header


def check_head(
    parser: httptools.HttpRequestParser, headers: Iterable[Header], size: RequestSize, *, expects_continue: bool
) -> None:
    """Raises Refused for a request that this server cannot understand or does not take."""
    hosts = 0
    for name, value in headers:
        if name == b"content-length":
            size.check_body(int(value))
        elif name == b"expect" and not expects_continue:
            raise Refused(417, "of Expect, only 100-continue is supported")
        elif name == b"transfer-encoding" and value.lower() != b"chunked":
            raise Refused(501, "of Transfer-Encoding, only chunked is supported")
        elif name == b"content-encoding" and value.lower() not in (b"", b"identity"):
            raise Refused(415, "a request's body must not be compressed: Content-Encoding is not supported")
        hosts += name == b"host"
    version = parser.get_http_version()
    if version not in ("1.0", "1.1"):
        raise Refused(400, "only HTTP/1.1 and HTTP/1.0 are supported")
    if hosts > 1 or (not hosts and version == "1.1"):
        raise Refused(400, "a request must have one Host header")
    if parser.get_method() == b"CONNECT":
        raise Refused(400, "CONNECT is not supported: this is not a proxy")


def complete_scope(scope: HTTPScope, parser: httptools.HttpRequestParser, target: bytes) -> None:
    """Adds the method, the version and the target to a scope. Raises Refused."""
    try:
        url = httptools.parse_url(target)
    except httptools.HttpParserInvalidURLError:
        raise Refused(400, "the request's target is not valid") from None
    raw_path = url.path or b"/"
    path = raw_path.decode("ascii")
    scope["method"], scope["http_version"] = parser.get_method().decode("ascii"), parser.get_http_version()
    scope["path"] = urllib.parse.unquote(path) if "%" in path else path
    scope["raw_path"], scope["query_string"] = raw_path, url.query or b""


def asks_for_upgrade(parser: httptools.HttpRequestParser) -> bool:
    """Whether the parser will leave the rest of the connection to another protocol."""
    return parser.should_upgrade() and parser.get_method() != b"CONNECT"


def without_upgrade(parser: httptools.HttpRequestParser, target: bytes, headers: Iterable[Header]) -> bytes:
    """The head that the parser has read, without its Upgrade header."""
    first = b"%b %b HTTP/%b\r\n" % (parser.get_method(), target, parser.get_http_version().encode())
    kept = [b"%b: %b\r\n" % header for header in headers if header[0] != b"upgrade"]
    return b"".join([first, *kept, b"\r\n"])

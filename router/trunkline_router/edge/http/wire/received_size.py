"""What has arrived of a request, in bytes and numbers, and the limits on it."""

from trunkline_router.edge.http.wire.limits import HttpLimits
from trunkline_router.edge.http.wire.refused import Refused

MAX_CHUNKS = 1 << 16  # of one body: each costs some microseconds, even if it is of one byte
CHUNK_FRAMING_BYTES = 12  # a size of up to 8 digits and two line ends


class RequestSize:
    """Counts what a parser finds in one request after another. Each method raises Refused beyond a limit."""

    __slots__ = ("_body_bytes", "_fed_bytes", "_has_begun", "_head_bytes", "_limits", "_num_chunks", "_num_headers")

    def __init__(self, limits: HttpLimits) -> None:
        self._limits = limits
        self._head_bytes = self._num_headers = self._body_bytes = self._num_chunks = 0
        self._has_begun = False  # in the bytes that are being parsed: the request that arrives
        self._fed_bytes = 0  # of that request

    def begin(self) -> None:
        """Another request begins."""
        self._head_bytes = self._num_headers = self._body_bytes = self._num_chunks = 0
        self._has_begun = True

    def check_url(self, num_bytes: int) -> None:
        if num_bytes > self._limits.max_url_bytes:
            raise Refused(414, f"a request's target has at most {self._limits.max_url_bytes} bytes")

    def add_header(self, num_bytes: int) -> None:
        """Counts a header or a trailer."""
        self._num_headers += 1
        self._head_bytes += num_bytes
        if self._num_headers > self._limits.max_headers or self._head_bytes > self._limits.max_header_bytes:
            raise Refused(431, self._headers_problem())

    def add_chunk(self) -> None:
        self._num_chunks += 1
        if self._num_chunks > MAX_CHUNKS:
            raise Refused(413, f"a body has at most {MAX_CHUNKS} chunks")

    def add_body(self, num_bytes: int) -> None:
        self._body_bytes += num_bytes
        self.check_body(self._body_bytes)

    def check_body(self, num_bytes: int) -> None:
        if num_bytes > self._limits.max_body_bytes:
            raise Refused(413, f"a request's body has at most {self._limits.max_body_bytes} bytes")

    # The parser collects an unfinished header or trailer and says nothing of it or of chunk extensions.

    def before_parsing(self) -> None:
        """The parser is about to get bytes."""
        self._has_begun = False

    def after_parsing(self, num_bytes: int) -> None:
        """The parser has got bytes, and a request is not complete. Raises Refused if too much of that request is
        neither body nor accounted for by its chunks."""
        if self._has_begun:
            self._fed_bytes = self._body_bytes  # how many came before it is not known, nor how many are its head's
            return
        self._fed_bytes += num_bytes
        most = 2 * (self._limits.max_url_bytes + self._limits.max_header_bytes) + CHUNK_FRAMING_BYTES * self._num_chunks
        if self._fed_bytes - self._body_bytes > most:
            raise Refused(431, self._headers_problem())

    def _headers_problem(self) -> str:
        return (
            f"a request has at most {self._limits.max_headers} headers and trailers of {self._limits.max_header_bytes} "
            "bytes in all, and short chunk extensions"
        )

"""What all requests of a process let wait for their clients, together."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trunkline_router.request_stream import RequestStream

MAX_ALL_WAITING_BYTES = 512 << 20  # where nothing else is set


class Backlog:
    """What all requests of a process let wait, bounded: past it, who is furthest behind loses its request, so that
    many slow clients together do not take the memory either. Streams that merge nothing are not counted."""

    def __init__(self, max_bytes: int = MAX_ALL_WAITING_BYTES) -> None:
        self._max_bytes = max_bytes
        self._streams: dict[RequestStream, int] = {}  # bytes that wait
        self.waiting_bytes = 0

    def grow(self, stream: "RequestStream", more_bytes: int) -> None:
        """So much more waits in it. Whoever has to end for that ends here."""
        self._streams[stream] = self._streams.get(stream, 0) + more_bytes
        self.waiting_bytes += more_bytes
        while self.waiting_bytes > self._max_bytes:
            furthest_behind = max(self._streams, key=self._streams.__getitem__)
            furthest_behind.fall_behind(f"more than {self._max_bytes} bytes of output waited for all clients")

    def shrink(self, stream: "RequestStream", less_bytes: int) -> None:
        """So much less waits in it."""
        self.waiting_bytes -= less_bytes
        self._streams[stream] -= less_bytes
        if not self._streams[stream]:
            del self._streams[stream]

    def clear(self, stream: "RequestStream") -> None:
        """Nothing waits in it any more."""
        self.waiting_bytes -= self._streams.pop(stream, 0)

"""What all requests of a process let wait for their clients, together."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol

MAX_ALL_WAITING_BYTES = 512 << 20  # where nothing else is set
TURN_BYTES = 2 << 20  # of memory given back in one turn of the event loop: about half a millisecond


class Waiting(Protocol):
    """What waits of one request: ClientBuffer, which knows this module."""

    @property
    def fall_behind(self) -> Callable[[str], None]:
        """To be called with the reason where it may wait no longer."""
        ...


class Remains:
    """What was kept for clients that read no more. It is freed a part in a turn of the event loop, because hundreds of
    slow clients may go at the same time, with all that has waited for them: to free 500 MiB takes 0.1 s."""

    def __init__(self) -> None:
        self._parts: deque[tuple[object, int]] = deque()
        self.bytes_so_far = 0  # freed

    def drop(self, parts: Iterable[tuple[object, int]]) -> None:
        """Frees these in time, each with its bytes. Nothing else may refer to them."""
        is_due = not self._parts
        self._parts.extend(parts)
        if is_due and self._parts:
            self._free_soon()

    def _free_soon(self) -> None:
        asyncio.get_running_loop().call_soon(self._free)

    def _free(self) -> None:
        freed_bytes = 0
        while self._parts and freed_bytes < TURN_BYTES:
            freed_bytes += self._parts.popleft()[1]
        self.bytes_so_far += freed_bytes
        if self._parts:
            self._free_soon()


class Backlog:
    """What all requests of a process let wait, bounded: past it, who is furthest behind loses its request, so that
    many slow clients together do not take the memory either. Who merges nothing is not counted."""

    def __init__(self, max_bytes: int = MAX_ALL_WAITING_BYTES) -> None:
        self._max_bytes = max_bytes
        self._waiting: dict[Waiting, int] = {}  # bytes that wait
        self.waiting_bytes = 0
        self.remains = Remains()

    def grow(self, waiting: Waiting, more_bytes: int) -> None:
        """So much more waits in it. Whoever has to end for that ends here."""
        self._waiting[waiting] = self._waiting.get(waiting, 0) + more_bytes
        self.waiting_bytes += more_bytes
        while self.waiting_bytes > self._max_bytes:
            furthest_behind = max(self._waiting, key=self._waiting.__getitem__)
            furthest_behind.fall_behind(f"more than {self._max_bytes} bytes of output waited for all clients")

    def shrink(self, waiting: Waiting, less_bytes: int) -> None:
        """So much less waits in it."""
        self.waiting_bytes -= less_bytes
        self._waiting[waiting] -= less_bytes
        if not self._waiting[waiting]:
            del self._waiting[waiting]

    def clear(self, waiting: Waiting) -> None:
        """Nothing waits in it any more."""
        self.waiting_bytes -= self._waiting.pop(waiting, 0)

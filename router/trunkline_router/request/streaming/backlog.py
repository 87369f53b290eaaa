"""The total output of a process that waits for clients to read it."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol

MAX_ALL_WAITING_BYTES = 512 << 20  # default
TURN_BYTES = 2 << 20  # memory freed in one turn of the event loop: about half a millisecond


class Waiting(Protocol):
    """The waiting output of one request: a ClientBuffer, whose module imports this one."""

    @property
    def fall_behind(self) -> Callable[[str], None]:
        """Ends the request. Takes the reason."""
        ...


class DeferredFrees:
    """Frees the output that was kept for clients which have left, one part per turn of the event loop. Hundreds of slow
    clients may leave at the same time, and freeing 500 MiB takes 0.1 s."""

    def __init__(self) -> None:
        self._parts: deque[tuple[object, int]] = deque()
        self.freed_bytes = 0  # so far

    def drop(self, parts: Iterable[tuple[object, int]]) -> None:
        """Frees the parts, given with their sizes in bytes, over time. There must be no other reference to them."""
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
        self.freed_bytes += freed_bytes
        if self._parts:
            self._free_soon()


class Backlog:
    """Bounds the waiting output of all requests of a process. Beyond the bound, the request with the most waiting bytes
    ends, so that many slow clients together cannot exhaust the memory. Output that has not merged is not counted."""

    def __init__(self, max_bytes: int = MAX_ALL_WAITING_BYTES) -> None:
        self._max_bytes = max_bytes
        self._waiting: dict[Waiting, int] = {}  # waiting bytes by request
        self.waiting_bytes = 0
        self.deferred_frees = DeferredFrees()

    def grow(self, waiting: Waiting, more_bytes: int) -> None:
        """Adds to a request's waiting bytes. Ends requests if the bound is exceeded, perhaps this one."""
        self._waiting[waiting] = self._waiting.get(waiting, 0) + more_bytes
        self.waiting_bytes += more_bytes
        while self.waiting_bytes > self._max_bytes:
            furthest_behind = max(self._waiting, key=self._waiting.__getitem__)
            furthest_behind.fall_behind(f"more than {self._max_bytes} bytes of output were waiting for all clients")

    def shrink(self, waiting: Waiting, less_bytes: int) -> None:
        """Subtracts from a request's waiting bytes."""
        self.waiting_bytes -= less_bytes
        self._waiting[waiting] -= less_bytes
        if not self._waiting[waiting]:
            del self._waiting[waiting]

    def clear(self, waiting: Waiting) -> None:
        """Removes a request from the count."""
        self.waiting_bytes -= self._waiting.pop(waiting, 0)

"""Memory for large requests, shared between their senders.

When it is full, the largest holder loses a request: the host with the most bytes, on it the connection with the most,
and on that the tenant with the most. A new request is refused only if its own sender is the largest holder.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from trunkline.status import CODE_RESOURCE_EXHAUSTED, OVERLOADED, RequestRefused
from trunkline_router.access.gate.rotation import Path
from trunkline_router.access.gate.sender import Sender

RETRY_MS = 1000


@dataclass(frozen=True, slots=True)
class ByteBounds:
    """Limits in bytes on the wire of large requests whose answers have not begun. In memory they take three or four
    times as much. Requests being answered do not count: workers bound their number, and long contexts are normal."""

    in_all: int = 128 << 20
    of_host: int = 112 << 20
    of_account: int = 48 << 20  # of a tenant, or of a host's requests without a tenant


class HeldBytes:
    """The bytes that large requests hold, by sender."""

    def __init__(self, bounds: ByteBounds) -> None:
        self._bounds = bounds
        self._of_account: Counter[str] = Counter()
        self._of_path: Counter[Path] = Counter()  # by host, by connection, and by tenant on a connection
        self._held: dict[_Held, None] = {}  # oldest first
        self.num_bytes = 0

    @contextmanager
    def holding(self, num_bytes: int, sender: Sender, give_up: Callable[[RequestRefused], object]) -> Iterator[None]:
        """Counts a large request while the context is open. `give_up` is called if the request must make room.

        Raises RequestRefused (OVERLOADED) if there is no room and the request's sender is the largest holder.
        """
        bounds, account = self._bounds, sender.tenant or sender.host
        if self._of_account[account] + num_bytes > bounds.of_account:
            raise _overloaded()
        while self._of_path[sender[:1]] + num_bytes > bounds.of_host:
            self._evict_from_largest(sender, num_bytes, within=sender[:1])
        while self.num_bytes + num_bytes > bounds.in_all:
            self._evict_from_largest(sender, num_bytes, within=())
        held = _Held(num_bytes, sender, give_up)
        self._held[held] = None
        self._count(held, num_bytes)
        try:
            yield
        finally:
            self._drop(held)

    def _evict_from_largest(self, newcomer: Sender, num_bytes: int, within: Path) -> None:
        """Evicts the newest request of the largest holder below `within`. Raises RequestRefused if that is the newcomer
        itself."""
        most = within
        for length in range(len(within) + 1, len(Sender._fields) + 1):
            ours = newcomer[:length] if newcomer[: len(most)] == most else None
            paths = [path for path in self._of_path if len(path) == length and path[: len(most)] == most]
            first = max(paths, key=self._of_path.__getitem__, default=None)
            if first is None or (ours is not None and self._of_path[ours] + num_bytes >= self._of_path[first]):
                first = ours
            if first is None:
                raise _overloaded()
            most = first
        if most == newcomer:
            raise _overloaded()
        given_up = next(held for held in reversed(self._held) if held.sender == most)
        self._drop(given_up)
        given_up.give_up(_overloaded())

    def _drop(self, held: "_Held") -> None:
        if held in self._held:
            del self._held[held]
            self._count(held, -held.num_bytes)

    def _count(self, held: "_Held", change: int) -> None:
        sender = held.sender
        self.num_bytes += change
        self._of_account[account := sender.tenant or sender.host] += change
        if not self._of_account[account]:
            del self._of_account[account]
        for path in sender.paths:
            self._of_path[path] += change
            if not self._of_path[path]:
                del self._of_path[path]


@dataclass(frozen=True, slots=True, eq=False)
class _Held:
    num_bytes: int
    sender: Sender
    give_up: Callable[[RequestRefused], object]


def _overloaded() -> RequestRefused:
    message = "too many large requests are waiting for their answers"
    return RequestRefused(CODE_RESOURCE_EXHAUSTED, OVERLOADED, message, retry_delay_ms=RETRY_MS)

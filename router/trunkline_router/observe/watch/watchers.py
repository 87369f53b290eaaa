"""How many may watch at the same time."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from trunkline.status import CODE_RESOURCE_EXHAUSTED, OVERLOADED, RequestRefused

MOST_OF_CALLER = 8  # of one identity, whatever tenants it acts for
MOST_OF_USERS = 48
MOST_WATCHERS = 64  # in all: what is left is for operators
RETRY_MS = 5000


class Watchers:
    """Counts watchers.  on_change: called with their number"""

    def __init__(self, on_change: Callable[[int], None]) -> None:
        self._on_change = on_change
        self._of_caller: Counter[str] = Counter()
        self.num_open = 0

    @contextmanager
    def watching(self, identity: str, *, is_operator: bool) -> Iterator[None]:
        """Counts one watcher while the context is open. Raises RequestRefused (OVERLOADED) if there are too many."""
        most = MOST_WATCHERS if is_operator else MOST_OF_USERS
        if self._of_caller[identity] >= MOST_OF_CALLER:
            raise _refusal(f"this caller has {MOST_OF_CALLER}")
        if self.num_open >= most:
            raise _refusal(f"{self.num_open} are open")
        self._of_caller[identity] += 1
        self._changed(1)
        try:
            yield
        finally:
            self._of_caller[identity] -= 1
            if not self._of_caller[identity]:
                del self._of_caller[identity]
            self._changed(-1)

    def _changed(self, by: int) -> None:
        self.num_open += by
        self._on_change(self.num_open)


def _refusal(reason: str) -> RequestRefused:
    message = f"too many watch the fleet already: {reason}"
    return RequestRefused(CODE_RESOURCE_EXHAUSTED, OVERLOADED, message, retry_delay_ms=RETRY_MS)

"""Output tokens of one request, as far as workers have computed them, whether its client has taken them or not."""

import sys
from collections.abc import Callable


class OutputMeter:
    """Of all choices. Tells once when there are more than it was asked about: nothing has to poll it."""

    __slots__ = ("_bound_tokens", "_on_past", "tokens")

    def __init__(self) -> None:
        self.tokens = 0
        self._bound_tokens = sys.maxsize
        self._on_past: Callable[[], None] | None = None

    def add(self, tokens: int) -> None:
        """So many more."""
        self.tokens += tokens
        if self.tokens > self._bound_tokens:
            self._tell()

    def when_past(self, tokens: int, on_past: Callable[[], None]) -> None:
        """Has it told, once, when there are more than that; now, where there are already. Takes the place of what was
        asked for before."""
        self._bound_tokens, self._on_past = tokens, on_past
        self.add(0)

    def _tell(self) -> None:
        on_past, self._on_past, self._bound_tokens = self._on_past, None, sys.maxsize
        if on_past is not None:
            on_past()

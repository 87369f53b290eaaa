"""Counts the output tokens that workers have computed for one request, whether or not its client has read them."""

import sys
from collections.abc import Callable


class OutputMeter:
    """Counts the output tokens of all choices. Calls back when a limit is exceeded, so that nothing has to poll it."""

    __slots__ = ("_limit_tokens", "_on_past", "tokens")

    def __init__(self) -> None:
        self.tokens = 0
        self._limit_tokens = sys.maxsize
        self._on_past: Callable[[], None] | None = None

    def add(self, tokens: int) -> None:
        """Counts `tokens` more."""
        self.tokens += tokens
        if self.tokens > self._limit_tokens:
            self._notify()

    def when_past(self, tokens: int, on_past: Callable[[], None]) -> None:
        """Calls `on_past` once when the count exceeds `tokens`, at once if it does already. Replaces any previous
        callback."""
        self._limit_tokens, self._on_past = tokens, on_past
        self.add(0)

    def _notify(self) -> None:
        on_past, self._on_past, self._limit_tokens = self._on_past, None, sys.maxsize
        if on_past is not None:
            on_past()

"""Searches a stream of text for stop strings, and holds back text that may become one."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Released:
    """Text that may be sent, and the stop string that ended the stream, or None."""

    text: str
    matched: str | None = None


class StopSearch:
    """A streaming search for stop strings. The match that ends first wins; of several with one end, the longest."""

    def __init__(self, stops: Sequence[str], *, include_stop: bool) -> None:
        self._stops = tuple(stops)
        self._firsts = frozenset(stop[0] for stop in self._stops)
        self._longest = max(map(len, self._stops), default=0)
        self._include_stop = include_stop
        self._held = ""

    @property
    def held(self) -> str:
        """Text that is held back because a stop string may begin in it."""
        return self._held

    def push(self, text: str, *, may_stop: bool) -> Released:
        """Takes new text and returns what it releases. Unless `may_stop`, no match may end in it."""
        buffer = self._held + text
        if may_stop and (match := self._first_match(buffer)) is not None:
            start, stop = match
            self._held = ""
            return Released(buffer[: start + len(stop)] if self._include_stop else buffer[:start], stop)
        keep = self._longest_beginning(buffer)
        self._held = buffer[len(buffer) - keep :]
        return Released(buffer[: len(buffer) - keep])

    def flush(self) -> str:
        """Returns the text that was held back. The output ends here."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, buffer: str) -> tuple[int, str] | None:
        best: tuple[int, int, str] | None = None  # (end, start, stop)
        for stop in self._stops:
            # A match must end in the new text.
            start = buffer.find(stop, max(0, len(self._held) - len(stop) + 1))
            if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                best = (start + len(stop), start, stop)
        return None if best is None else best[1:]

    def _longest_beginning(self, buffer: str) -> int:
        """Returns the length of the longest suffix of `buffer` that is a proper prefix of a stop string."""
        for start in range(max(0, len(buffer) - self._longest + 1), len(buffer)):
            if buffer[start] in self._firsts:  # rules out most positions, for any number and length of stop strings
                tail = buffer[start:]
                if any(len(stop) > len(tail) and stop.startswith(tail) for stop in self._stops):
                    return len(tail)
        return 0

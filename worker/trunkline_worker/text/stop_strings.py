"""Looking for stop strings in a stream of text, without letting out what may become one."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Released:
    """Text that may go out, and the stop string that ended the stream, if one did."""

    text: str
    matched: str | None = None


class StopSearch:
    """The match that ends first wins; of several that end there, the longest."""

    def __init__(self, stops: Sequence[str], *, include_stop: bool) -> None:
        self._stops = tuple(stops)
        self._firsts = frozenset(stop[0] for stop in self._stops)
        self._longest = max(map(len, self._stops), default=0)
        self._include_stop = include_stop
        self._held = ""

    @property
    def held(self) -> str:
        """What is held back, because a stop string may begin there."""
        return self._held

    def push(self, text: str, *, may_stop: bool) -> Released:
        """Takes new text in. With `may_stop` false (min_tokens) no match may end in this text."""
        buffer = self._held + text
        if may_stop and (match := self._first_match(buffer)) is not None:
            start, stop = match
            self._held = ""
            return Released(buffer[: start + len(stop)] if self._include_stop else buffer[:start], stop)
        keep = self._longest_beginning(buffer)
        self._held = buffer[len(buffer) - keep :]
        return Released(buffer[: len(buffer) - keep])

    def flush(self) -> str:
        """What was held back, at the end of the output."""
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
        """Length of the longest end of `buffer` that is a proper beginning of a stop string."""
        for start in range(max(0, len(buffer) - self._longest + 1), len(buffer)):
            if buffer[start] in self._firsts:  # most positions end here, however many and long the stop strings are
                tail = buffer[start:]
                if any(len(stop) > len(tail) and stop.startswith(tail) for stop in self._stops):
                    return len(tail)
        return 0

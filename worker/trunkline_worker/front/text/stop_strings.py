"""Searches a stream of text for stop strings, and holds back text that may become one."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass

from trunkline_worker.front.text.detokenizer import NewText


@dataclass(frozen=True, slots=True)
class Released:
    """Text that may be sent, and the stop string that ended the stream, or None."""

    text: str
    matched: str | None = None


class StopSearch:
    """A streaming search for stop strings.

    The output ends at the first token after which its text contains a stop string. That text is the text of its tokens
    so far, decoded as if the output ended there, without a character that later tokens may complete. What later tokens
    would do to the text does not matter: newlines in a run of byte tokens stop the output as they come, although an
    invalid byte after them would turn the whole run into U+FFFD. The token after which a match is first there decides
    whether the match counts (min_tokens). The match that ends first wins; of several with one end, the longest.

    Exception: text that the tokenizer's decoder holds back is searched when the decoder releases it. If a step other
    than Fuse directly follows ByteFallback, the decoder releases a run of byte tokens only when the run ends.
    """

    def __init__(self, stops: Sequence[str], *, include_stop: bool) -> None:
        self._stops = tuple(stops)
        self._firsts = frozenset(stop[0] for stop in self._stops)
        self._longest = max(map(len, self._stops), default=0)
        self._include_stop = include_stop
        self._held = ""  # the end of the text, in which a stop string may begin
        self._final_held = ""  # the same, for the text without its undecided end
        self._undecided: list[str] = []  # text before `_held` that cannot leave yet because later tokens may change it

    def push(self, new: NewText, *, may_stop: bool) -> Released:
        """Takes new text and returns what it releases. Unless `may_stop`, no match may end in it."""
        if new.withdraws:
            self._held = self._final_held
            self._undecided.clear()
        buffer = self._held + new.text
        match = self._first_match(buffer) if may_stop else None
        if match is not None:
            start, stop = match
            self._held = ""
            return Released(self._decided(buffer[: start + len(stop) * self._include_stop]), stop)
        num_released = len(buffer) - self._longest_beginning(buffer)
        self._held = buffer[num_released:]
        if not new.is_final:
            self._undecided.append(buffer[:num_released])
            return Released("")
        self._final_held = self._held
        return Released(self._decided(buffer[:num_released]))

    def flush(self) -> str:
        """Returns the text that was held back. The output ends here, and its text is final."""
        held, self._held = self._held, ""
        return held

    def peek(self, new: NewText, *, may_stop: bool) -> Released:
        """Returns what push() and, without a match, flush() would return now."""
        copied = copy.deepcopy(self)
        released = copied.push(new, may_stop=may_stop)
        return Released(released.text + copied.flush(), released.matched)

    def _decided(self, text: str) -> str:
        """Returns the undecided text, which is part of the output, and the text after it."""
        if self._undecided:
            text = "".join((*self._undecided, text))
            self._undecided.clear()
        return text

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

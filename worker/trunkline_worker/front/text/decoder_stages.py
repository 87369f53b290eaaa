"""Streaming versions of the steps of a tokenizer's decoder.

A decoder of the tokenizers library applies steps to the list of all pieces (tokens' texts), each of which returns
another list, and joins the last list. A stage here does the same piece by piece: it releases what no later piece can
change, and holds back the rest. In the end, the released text equals the library's joined list.

Stages can be copied with `copy.copy`: ending the copy does not affect the original.
"""

import codecs
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

REPLACEMENT = "\ufffd"  # stands for bytes that are not valid UTF-8

Unit = TypeVar("Unit", contravariant=True)
TextMap = Callable[[str], str]


class Stage(Protocol[Unit]):
    """One step of a decoder, as a stream."""

    def push(self, unit: Unit) -> Sequence[str]:
        """Takes the next piece and returns the pieces that are now final."""
        ...

    def end(self) -> Sequence[str]:
        """Returns the pieces that were held back. No piece may follow."""
        ...


AnyStage = Stage[Any]


class Characters:
    """ByteLevel: the bytes of all tokens are one UTF-8 text. Only an incomplete character is held back, at most 3
    bytes.

    As in the library, every maximal part of a character that is never completed becomes one U+FFFD.
    """

    __slots__ = ("_incomplete",)

    def __init__(self) -> None:
        self._incomplete = b""

    def push(self, unit: bytes) -> Sequence[str]:
        data = self._incomplete + unit if self._incomplete else unit
        text, used = codecs.utf_8_decode(data, "replace", False)
        self._incomplete = data[used:]
        return (text,)

    def end(self) -> Sequence[str]:
        text, _ = codecs.utf_8_decode(self._incomplete, "replace", True)
        self._incomplete = b""
        return (text,)


class ByteRun:
    """ByteFallback: a run of consecutive one-byte tokens is text if the whole run is valid UTF-8; else each token is
    one U+FFFD.

    The text of a run is undecided until the run ends, or a byte makes it invalid UTF-8.
    """

    __slots__ = ("_bytes", "_incomplete", "is_text")

    def __init__(self) -> None:
        self._bytes = bytearray()
        self._incomplete = b""  # the bytes of the last character, if more must follow
        self.is_text = True  # whether the run may still be text

    def push(self, byte: int) -> str:
        """Returns the character that this byte completes. It is empty if the byte completes none."""
        self._bytes.append(byte)
        if not self.is_text:
            return ""
        data = self._incomplete + bytes((byte,))
        try:
            text, used = codecs.utf_8_decode(data, "strict", False)
        except UnicodeDecodeError:
            self.is_text = False
            return ""
        self._incomplete = data[used:]
        return text

    @property
    def is_complete(self) -> bool:
        """Whether the run is text if it ends here."""
        return self.is_text and not self._incomplete

    def pieces(self) -> Sequence[str]:
        """Returns the pieces of the run if it ends here."""
        return (self._bytes.decode(),) if self.is_complete else (REPLACEMENT,) * len(self._bytes)


class FirstDiffers:
    """WordPiece, Metaspace, and the blanks that join tokens if there is no decoder: the first piece is changed
    differently from the others. `begun`: the first piece precedes this stream.
    """

    __slots__ = ("_begun", "_first", "_rest")

    def __init__(self, first: TextMap, rest: TextMap, *, begun: bool) -> None:
        self._first, self._rest, self._begun = first, rest, begun

    def push(self, unit: str) -> Sequence[str]:
        if self._begun:
            return (self._rest(unit),)
        self._begun = True
        return (self._first(unit),)

    def end(self) -> Sequence[str]:
        return ()


class LastDiffers:
    """BPEDecoder: the end of a word becomes a blank, except in the last piece."""

    __slots__ = ("_held", "_last", "_rest")

    def __init__(self, last: TextMap, rest: TextMap) -> None:
        self._last, self._rest = last, rest
        self._held: str | None = None

    def push(self, unit: str) -> Sequence[str]:
        held, self._held = self._held, unit
        return () if held is None else (self._rest(held),)

    def end(self) -> Sequence[str]:
        held, self._held = self._held, None
        return () if held is None else (self._last(held),)


class WithoutRepeats:
    """CTC: drops a piece that equals the one before it, and a piece that `change` makes empty."""

    __slots__ = ("_change", "_previous")

    def __init__(self, change: TextMap) -> None:
        self._change = change
        self._previous: str | None = None

    def push(self, unit: str) -> Sequence[str]:
        if unit == self._previous:
            return ()
        self._previous = unit
        text = self._change(unit)
        return (text,) if text else ()

    def end(self) -> Sequence[str]:
        return ()


class Changed:
    """Replace and Strip, applied to each piece by itself."""

    __slots__ = ("_change",)

    def __init__(self, change: TextMap) -> None:
        self._change = change

    def push(self, unit: str) -> Sequence[str]:
        return (self._change(unit),)

    def end(self) -> Sequence[str]:
        return ()


class WithoutStart:
    """Strip, applied to the whole text: removes up to `count` times the character `content` at its beginning."""

    __slots__ = ("_content", "_count")

    def __init__(self, content: str, count: int) -> None:
        self._content, self._count = content, count

    def push(self, unit: str) -> Sequence[str]:
        while self._count and unit:
            if unit[0] != self._content:
                self._count = 0
                break
            unit = unit[1:]
            self._count -= 1
        return (unit,)

    def end(self) -> Sequence[str]:
        return ()


class WithoutEnd:
    """Strip, applied to the whole text: removes up to `count` times the character `content` at its end."""

    __slots__ = ("_content", "_count", "_held")

    def __init__(self, content: str, count: int) -> None:
        self._content, self._count = content, count
        self._held = ""

    def push(self, unit: str) -> Sequence[str]:
        text = self._held + unit
        end = len(text)
        while end and len(text) - end < self._count and text[end - 1] == self._content:
            end -= 1
        self._held = text[end:]
        return (text[:end],)

    def end(self) -> Sequence[str]:
        self._held = ""
        return ()


class Replaced:
    """Replace, applied to the whole text. An end that may be the beginning of `pattern` is held back."""

    __slots__ = ("_content", "_held", "_pattern")

    def __init__(self, pattern: str, content: str) -> None:
        self._pattern, self._content = pattern, content
        self._held = ""

    def push(self, unit: str) -> Sequence[str]:
        *parts, rest = (self._held + unit).split(self._pattern)
        longest = min(len(self._pattern) - 1, len(rest))
        keep = next(size for size in range(longest, -1, -1) if rest.endswith(self._pattern[:size]))
        self._held = rest[len(rest) - keep :]
        return (self._content.join((*parts, rest[: len(rest) - keep])),)

    def end(self) -> Sequence[str]:
        held, self._held = self._held, ""
        return (held,)


class Whole:
    """Any other step and all steps after it: no text is final before the end. `decode`: the library's, of all pieces"""

    __slots__ = ("_decode", "_pieces")

    def __init__(self, decode: Callable[[list[str]], str]) -> None:
        self._decode = decode
        self._pieces: list[str] = []

    def __copy__(self) -> "Whole":
        copy = Whole(self._decode)
        copy._pieces = self._pieces.copy()
        return copy

    def push(self, unit: str) -> Sequence[str]:
        self._pieces.append(unit)
        return ()

    def end(self) -> Sequence[str]:
        pieces, self._pieces = self._pieces, []
        return (self._decode(pieces),)

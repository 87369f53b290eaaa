"""Reads JSON as it comes. What models often write in its place becomes JSON: control characters in strings, backslashes
that begin no escape, commas after the last value, and the literals of Python. An escape of half a surrogate pair, which
no text can have, becomes one of U+FFFD."""

import json
import re
from collections.abc import Iterable
from typing import Any

from trunkline.answer.output_reader import Malformed, OutputReader, Reading, Write

MAX_DEPTH = 64  # of nested values: more are malformed, so clients can read what is passed on
MAX_SCALAR = 4096  # characters of a number
PYTHON_LITERALS = {"True": "true", "False": "false", "None": "null"}

_CLOSING = {"{": "}", "[": "]"}
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_HEX = "[0-9a-fA-F]"
_FIRST_HALF, _SECOND_HALF = f"u[dD][89abAB]{_HEX}{{2}}", f"u[dD][c-fC-F]{_HEX}{{2}}"
_ESCAPE = re.compile(
    rf'\\(?:["\\/bfnrt]|{_FIRST_HALF}\\{_SECOND_HALF}|(?P<half>{_FIRST_HALF}|{_SECOND_HALF})|u{_HEX}{{4}})'
)
_BEGIN_OF_ESCAPE = re.compile(rf"\\(?:u{_HEX}{{0,3}})?|\\{_FIRST_HALF}(?:\\(?:u(?:[dD](?:[c-fC-F]{_HEX}?)?)?)?)?")
_WORD = re.compile(r"[A-Za-z0-9+\-.]*")
_SCALAR = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?|true|false|null")


def escaped(text: str) -> str:
    """Returns a text as it stands between the quotes of JSON."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def scalar(text: str) -> str | None:
    """Returns a number or literal as JSON; None if it is none."""
    text = PYTHON_LITERALS.get(text, text)
    return text if len(text) <= MAX_SCALAR and _SCALAR.fullmatch(text) else None


def loaded(text: str) -> Any:
    """Returns the value of a JSON text. Raises ValueError, for what only Python reads as JSON and for what is too deep
    too."""
    try:
        value = json.loads(text, parse_constant=_refused_constant)
    except RecursionError:
        raise ValueError("too deeply nested") from None
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [inner for item in level for inner in _values_in(item)]
    if any(isinstance(item, dict | list) for item in level):
        raise ValueError("too deeply nested")
    return value


def _values_in(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _refused_constant(name: str) -> None:
    raise ValueError(name)


def without_halves(text: str) -> str:
    """Returns a JSON text without escapes of half a surrogate pair."""
    return _ESCAPE.sub(_whole, text)


def _whole(escape: "re.Match[str]") -> str:
    return "\\ufffd" if escape["half"] else escape[0]


class JsonReader(OutputReader):
    """Reads values of JSON. Each method raises Malformed and CutOff."""

    def value(self, write: Write) -> Reading[None]:
        """Writes a value as it comes."""
        closing = list[str]()
        while True:
            first = yield from self.peek(write)
            if first in _CLOSING:
                self._pass(first, write)
                if len(closing) >= MAX_DEPTH:
                    raise Malformed
                closing.append(_CLOSING[first])
                if (yield from self.peek(write)) != closing[-1]:
                    if first == "{":
                        yield from self._key(write)
                    continue
            elif first == '"':
                yield from self.string(write)
            else:
                yield from self._scalar(write)
            if not (yield from self._has_next(closing, write)):
                return

    def _has_next(self, closing: list[str], write: Write) -> Reading[bool]:
        """After a value: closes what ends. Returns whether another value of an object or array follows."""
        while closing:
            character = yield from self.peek(write)
            if character == closing[-1]:
                closing.pop()
                self._pass(character, write)
            elif character == ",":
                self._at += 1
                space = list[str]()
                if (yield from self.peek(space.append)) == closing[-1]:
                    continue
                write("".join((character, *space)))
                if closing[-1] == "}":
                    yield from self._key(write)
                return True
            else:
                raise Malformed
        return False

    def _pass(self, character: str, write: Write) -> None:
        self._at += 1
        write(character)

    def _key(self, write: Write) -> Reading[None]:
        if (yield from self.peek(write)) != '"':
            raise Malformed
        yield from self.string(write)
        if (yield from self.peek(write)) != ":":
            raise Malformed
        self._pass(":", write)

    def _scalar(self, write: Write) -> Reading[None]:
        while True:
            found = _WORD.match(self._text, self._at)
            assert found is not None  # it may be empty
            if len(found[0]) > MAX_SCALAR:
                raise Malformed
            if found.end() < len(self._text):
                break
            yield from self.more()
        word = scalar(found[0])
        if word is None:
            raise Malformed
        self._at = found.end()
        write(word)

    def string(self, write: Write) -> Reading[None]:
        """Writes a string with its quotes; a quote is next."""
        self._pass('"', write)
        while True:
            found = _PLAIN.match(self._text, self._at)
            assert found is not None  # it may be empty
            write(found[0])
            self._at = found.end()
            if self._at == len(self._text):
                yield from self.more()
                continue
            character = self._text[self._at]
            if character == '"':
                self._pass(character, write)
                return
            if character != "\\":
                write(escaped(character))
                self._at += 1
            elif _BEGIN_OF_ESCAPE.fullmatch(self._text, self._at):
                yield from self.more()
            elif escape := _ESCAPE.match(self._text, self._at):
                write(_whole(escape))
                self._at = escape.end()
            else:
                write("\\\\")
                self._at += 1

    def held_value(self) -> Reading[str]:
        """Returns a value's text when it is complete."""
        yield from self.peek()
        read = list[str]()
        yield from self.value(read.append)
        return "".join(read)

    def held_string(self) -> Reading[str]:
        """Returns a string's value."""
        if (yield from self.peek()) != '"':
            raise Malformed
        read = list[str]()
        yield from self.string(read.append)
        return str(json.loads("".join(read)))

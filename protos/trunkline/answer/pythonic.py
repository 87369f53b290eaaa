"""Llama 4, and Llama 3.2: the whole answer is a list of calls in Python: [name(key="text", other=[1, {"a": True}])].
Where the template asks for JSON, as Llama 4's own does, it is what Llama 3 writes."""

import json
import re
from collections.abc import Callable
from typing import TypeVar

from trunkline.answer.json_calls import Llama3Json
from trunkline.answer.json_reader import MAX_DEPTH, escaped, scalar
from trunkline.answer.output_reader import Malformed, Reading

T = TypeVar("T")

_CLOSING = {"[": "]", "(": ")", "{": "}"}
_PLAIN = re.compile(r"""[^'"\[\](){}]*""")
_IN_STRING = {quote: re.compile(rf"(?:[^{quote}\\]|\\.)*", re.DOTALL) for quote in "'\""}
_STRING = re.compile(r"""'((?:[^'\\]|\\.)*)'|"((?:[^"\\]|\\.)*)\"""", re.DOTALL)
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|(.))", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0", "\n": ""}
_NAME = re.compile(r"[A-Za-z_][\w.\-]*")
_WORD = re.compile(r"[\w+\-.]+")
_SPACE = re.compile(r"\s*")


class Pythonic(Llama3Json):
    """The calls of a list are parts when it is complete: before, it may be text."""

    calls = ("<|python_start|>",)
    ends = ("<|python_end|>",)

    def call(self, mark: str) -> Reading[None]:
        if mark:
            yield from self.sees(*self.ends)  # the history that Llama 4's template renders has both marks before JSON
        if (yield from self.peek()) == "[":
            yield from self._list(mark)
        else:
            yield from super().call(mark)
        yield from self.sees(*self.ends)

    def _list(self, mark: str) -> Reading[None]:
        source = yield from self._brackets()
        calls = Source(source).calls()
        if not mark and not all(name in self.context.argument_types for name, _ in calls):
            raise Malformed
        for name, arguments in calls:
            self.begin_call(name)
            self.put_arguments(arguments)
            self.end_call()

    def _brackets(self) -> Reading[str]:
        """Returns the text from a bracket to the one that closes it."""
        read, closing, quote = list[str](), list[str](), ""
        while True:
            found = (_IN_STRING[quote] if quote else _PLAIN).match(self._text, self._at)
            assert found is not None  # it may be empty
            read.append(found[0])
            self._at = found.end()
            character = self._text[self._at : self._at + 1]
            if not character or character == "\\":  # an escape that is not there as a whole
                yield from self.more()
                continue
            self._at += 1
            read.append(character)
            if quote:
                quote = ""
            elif character in "'\"":
                quote = character
            elif character in _CLOSING and len(closing) < MAX_DEPTH:
                closing.append(_CLOSING[character])
            elif not closing or character != closing.pop():
                raise Malformed
            elif not closing:
                return "".join(read)


class Source:
    """Python source of calls with literals. Its methods raise Malformed."""

    def __init__(self, text: str) -> None:
        self._text, self._at = text, 0

    def calls(self) -> list[tuple[str, str]]:
        """Returns the names of a list of calls, and their arguments as JSON."""
        calls = self._items("[", "]", self._call)
        if not calls:
            raise Malformed
        return calls

    def _call(self) -> tuple[str, str]:
        name = self._match(_NAME)
        arguments = self._items("(", ")", lambda: f"{json.dumps(self._match(_NAME))}: {self._after('=')}")
        return name, f"{{{', '.join(arguments)}}}"

    def _value(self) -> str:
        """Returns a literal as JSON."""
        match self._next():
            case "[":
                return f"[{', '.join(self._items('[', ']', self._value))}]"
            case "(":
                return f"[{', '.join(self._items('(', ')', self._value))}]"
            case "{":
                items = self._items("{", "}", lambda: f"{self._string()}: {self._after(':')}")
                return f"{{{', '.join(items)}}}"
            case "'" | '"':
                return self._string()
            case _:
                word = self._match(_WORD)
                value = word if word in ("true", "false", "null") else scalar(word)
                if value is None:
                    raise Malformed
                return value

    def _after(self, character: str) -> str:
        self._step(character)
        return self._value()

    def _items(self, begin: str, end: str, item: Callable[[], T]) -> list[T]:
        self._step(begin)
        items = list[T]()
        while self._next() != end:
            items.append(item())
            if self._next() != end:
                self._step(",")
        self._step(end)
        return items

    def _string(self) -> str:
        found = _STRING.match(self._text, self._at)
        if not found:
            raise Malformed
        self._at = found.end()
        self._next()
        return f'"{escaped(_ESCAPE.sub(_unescaped, found[1] if found[1] is not None else found[2]))}"'

    def _match(self, pattern: "re.Pattern[str]") -> str:
        self._next()
        found = pattern.match(self._text, self._at)
        if not found:
            raise Malformed
        self._at = found.end()
        return found[0]

    def _step(self, character: str) -> None:
        if self._next() != character:
            raise Malformed
        self._at += 1

    def _next(self) -> str:
        found = _SPACE.match(self._text, self._at)
        self._at = self._at if found is None else found.end()
        return self._text[self._at : self._at + 1]


def _unescaped(escape: "re.Match[str]") -> str:
    code = escape[1] or escape[2]
    if code:
        character = chr(int(code, 16))
        return character if character.isprintable() else escape[0]
    return _ESCAPED.get(escape[3], escape[3] if escape[3] in "'\"\\" else escape[0])

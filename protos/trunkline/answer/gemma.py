"""Gemma 4: <|tool_call>call:name{key:<|"|>text<|"|>,other:[1,{a:true}]}<tool_call|>, and reasoning in
<|channel>thought … <channel|>."""

import json
import re

from trunkline.answer.json_reader import MAX_DEPTH, escaped, scalar
from trunkline.answer.marked_parser import MarkedParser
from trunkline.answer.output_reader import SPACE, Malformed, Marks, Reading

_QUOTE = '<|"|>'
_NAME = re.compile(r"call:\s*([\w.:/\-]+)\s*")
_AFTER_NAME = Marks("{", "<")
_AFTER_KEY = Marks(":", "{", "}", "[", "]", ",")
_AFTER_SCALAR = Marks(",", "}", "]", "{", "[", "<")
_STRING_END = Marks(_QUOTE)


class Gemma(MarkedParser):
    strips = (False, True)
    thinks = (("<|channel>thought", "<channel|>"),)
    calls = ("<|tool_call>",)
    ends = ("<tool_call|>",)
    inner = (_QUOTE,)

    def call(self, mark: str) -> Reading[None]:
        head, after = yield from self.head(_AFTER_NAME, stay=True)
        name = _NAME.fullmatch(head)
        if not name or after != "{":
            raise Malformed
        self.begin_call(name[1])
        yield from self._value(0)
        self.end_call()
        yield from self.sees(*self.ends)

    def _value(self, depth: int) -> Reading[None]:
        """Writes a value as JSON."""
        if depth > MAX_DEPTH:
            raise Malformed
        match (yield from self.peek()):
            case "{":
                yield from self._items("{", "}", depth)
            case "[":
                yield from self._items("[", "]", depth)
            case '"':
                yield from self.string(self.put_arguments)
            case _ if (yield from self.sees(_QUOTE)):
                self.put_arguments('"')
                yield from self.until(_STRING_END, lambda text: self.put_arguments(escaped(text)))
                self.put_arguments('"')
            case _:
                text, _ = yield from self.head(_AFTER_SCALAR, stay=True)
                text = text.strip(SPACE)
                self.put_arguments(scalar(text) or json.dumps(text, ensure_ascii=False))

    def _items(self, begin: str, end: str, depth: int) -> Reading[None]:
        """Writes an object or array, at whose beginning it is."""
        self.skip(begin)
        self.put_arguments(begin)
        has_items = (yield from self.peek()) != end
        while has_items:
            if begin == "{":
                key, after = yield from self.head(_AFTER_KEY)
                if after != ":":
                    raise Malformed
                self.put_arguments(f"{json.dumps(key.strip(SPACE).replace(_QUOTE, ''), ensure_ascii=False)}: ")
            yield from self._value(depth + 1)
            separator = yield from self.peek()
            has_items = separator == ","
            if has_items:
                self.skip(separator)
                self.put_arguments(", ")
            elif separator != end:
                raise Malformed
        self.skip(end)
        self.put_arguments(end)

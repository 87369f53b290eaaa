"""Families that write each argument between marks. Values are raw text: the schema of the tool, or an attribute, says
what they are."""

import html
import json
import re
from collections.abc import Mapping, Sequence
from functools import partial

from trunkline.answer.argument_types import type_of
from trunkline.answer.json_reader import PYTHON_LITERALS, escaped, loaded, without_halves
from trunkline.answer.marked_parser import MarkedParser
from trunkline.answer.output_reader import CutOff, Malformed, Marks, Reading, Write

STRING = frozenset({"string"})
ANYTHING = ()  # may follow


def typed(raw: str, types: frozenset[str]) -> str:
    """Returns a value as JSON: as it is written if that is JSON of an allowed type; otherwise as a string, if that is
    allowed or it is not JSON at all."""
    written = raw.strip()
    if types & {"boolean", "null"} or not types:
        written = PYTHON_LITERALS.get(written, written)
    try:
        value = loaded(written)
    except ValueError:
        return json.dumps(raw, ensure_ascii=False)
    found = type_of(value)
    is_number = found in ("integer", "number") and ("number" in types or (value == value // 1 and "integer" in types))
    is_allowed = not types or found in types or is_number or "string" not in types
    return without_halves(written) if is_allowed else json.dumps(raw, ensure_ascii=False)


class ArgumentsParser(MarkedParser):
    """Writes the arguments one by one."""

    _has_arguments = False

    def begin(self, name: str) -> None:
        self.begin_call(name)
        self._has_arguments = False
        self._types = self.context.argument_types.get(name)

    def end(self) -> None:
        self.put_arguments("}" if self._has_arguments else "{}")
        self.end_call()

    def types_of(self, key: str) -> frozenset[str]:
        return frozenset() if self._types is None else self._types.of(key)

    def argument(self, key: str, types: frozenset[str], value: "Value") -> Reading[None]:
        """Writes an argument: a string as it comes, other values when they are complete."""
        self.put_arguments(f"{', ' if self._has_arguments else '{'}{json.dumps(key, ensure_ascii=False)}: ")
        self._has_arguments = True
        if types == STRING:
            self.put_arguments('"')
            yield from value.read(lambda text: self.put_arguments(escaped(text)))
            self.put_arguments('"')
        else:
            read = list[str]()
            yield from value.read(read.append)
            self.put_arguments(typed("".join(read), types))


class Value:
    """The raw value of an argument.

    end: the mark at its end
    ends: marks that may be its end, with what must follow: otherwise they are part of the value
    lines: a newline at its beginning, and then one at its end, are not part of it
    """

    def __init__(
        self, parser: MarkedParser, end: str, ends: Mapping[str, Sequence[str]], *, lines: bool = False
    ) -> None:
        self._parser, self._end, self._ends, self._lines = parser, end, ends, lines
        self._marks = Marks.of(*ends)

    def read(self, write: Write) -> Reading[None]:
        """Writes it. Steps over its end, but not over another mark that ends it. Raises CutOff."""
        parser = self._parser
        put = Lines(write).write if self._lines else write
        while mark := (yield from parser.until(self._marks, put, stay=True)):
            is_end = yield from parser.follows(len(mark), self._ends[mark])
            if not is_end or mark == self._end:
                parser.skip(mark)
            if is_end:
                return
            put(mark)
        raise CutOff


class Lines:
    """Leaves out a newline at the beginning of a value, and then one at its end."""

    def __init__(self, write: Write) -> None:
        self._write = write
        self._held: str | None = None  # None: nothing has come yet
        self._is_lines = False

    def write(self, text: str) -> None:
        if not text:
            return
        if self._held is None:
            self._held, self._is_lines = "", text[0] == "\n"
            text = text[1:] if self._is_lines else text
        text = self._held + text
        self._held = "\n" if self._is_lines and text.endswith("\n") else ""
        self._write(text[: len(text) - len(self._held)])


class QwenXml(ArgumentsParser):
    """Qwen3-Coder, and Qwen since 3.5: <tool_call><function=name><parameter=key>value</parameter></function>
    </tool_call>. Models forget the first mark, or the end of a value."""

    calls = ("<tool_call>", "<function=")
    ends = ("</tool_call>",)
    inner = ("</function>", "<parameter=", "</parameter>")
    calls_while_thinking = True

    _ENDS: Mapping[str, Sequence[str]] = {
        "</parameter>": ("<parameter=", "</function>"),
        "\n<parameter=": ANYTHING,
        "</function>": ("</tool_call>", ""),
    }
    _TAG_END = Marks(">", "\n", "<")

    def begins_call(self, mark: str) -> Reading[bool]:
        return mark == "<tool_call>" and (yield from self.follows(0, ("<function=",)))

    def call(self, mark: str) -> Reading[None]:
        if mark == "<tool_call>" and not (yield from self.sees("<function=")):
            raise Malformed
        name = yield from self._tag()
        if mark != "<tool_call>" and name not in self.context.argument_types:
            raise Malformed
        tag = yield from self.sees("<parameter=", "</function>")
        if tag:
            self.begin(name)
        value = Value(self, "</parameter>", self._ENDS, lines=True)
        while tag == "<parameter=":
            key = yield from self._tag()
            yield from self.argument(key, self.types_of(key), value)
            tag = yield from self.sees("<parameter=", "</function>")
        if not tag:
            raise Malformed
        self.end()
        yield from self.sees("</tool_call>")

    def _tag(self) -> Reading[str]:
        name, end = yield from self.head(self._TAG_END)
        if end != ">":
            raise Malformed
        return name


class Glm(ArgumentsParser):
    """GLM since 4.5: <tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>. Older models have
    newlines between the marks."""

    calls = ("<tool_call>",)
    ends = ("</tool_call>",)
    inner = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")

    _ENDS: Mapping[str, Sequence[str]] = {
        "</arg_value>": ("<arg_key>", "</tool_call>"),
        "</tool_call>": ("<tool_call>", ""),
    }
    _AFTER_NAME = Marks("<")
    _NAME = re.compile(r"([^\s<>]+)\s*")
    _AFTER_KEY = Marks("</arg_key>", *calls, *ends)

    def call(self, mark: str) -> Reading[None]:
        head, _ = yield from self.head(self._AFTER_NAME, stay=True)
        name = self._NAME.fullmatch(head)
        tag = yield from self.sees("<arg_key>", "</tool_call>")
        if not name or not tag:
            raise Malformed
        self.begin(name[1])
        value = Value(self, "</arg_value>", self._ENDS)
        while tag == "<arg_key>":
            key, after = yield from self.head(self._AFTER_KEY, stay=True)
            if after != "</arg_key>":
                raise Malformed
            self.skip(after)
            if not (yield from self.sees("<arg_value>")):
                raise Malformed
            yield from self.argument(key, self.types_of(key), value)
            tag = yield from self.sees("<arg_key>", "</tool_call>")
        if not tag:
            raise Malformed
        self.end()


_ATTRIBUTE = re.compile(r'(\w+)="([^"]*)"')


class AttributesParser(ArgumentsParser):
    """Calls stand in a section, and the marks of calls and arguments have attributes."""

    def calls_in(self, *, calls: tuple[str, str], arguments: tuple[str, str], tag_end: str, end: str) -> Reading[None]:
        """calls, arguments: the marks around a call and an argument, the first without its attributes"""
        call = partial(self._call, calls[1], arguments, tag_end)
        yield from self.section(begin=calls[0], call=call, call_end=calls[1], end=end)

    def _call(self, end: str, arguments: tuple[str, str], tag_end: str) -> Reading[None]:
        value = Value(self, arguments[1], {arguments[1]: (arguments[0], end)})
        attributes, is_empty = yield from self._attributes(tag_end)
        self.begin(attributes.get("name", attributes.get("tool", "")))
        while not is_empty:
            tag = yield from self.sees(arguments[0], end)
            if not tag:
                raise Malformed
            if tag == end:
                break
            attributes, _ = yield from self._attributes(tag_end)
            is_string = attributes.get("type") == "string" or attributes.get("string") == "true"
            key = attributes.get("name", attributes.get("key", ""))
            yield from self.argument(key, STRING if is_string else frozenset(), value)
        self.end()

    def _attributes(self, tag_end: str) -> Reading[tuple[Mapping[str, str], bool]]:
        """Returns the attributes of a tag, and whether it is empty."""
        text, _ = yield from self.head(Marks.of(tag_end))
        return {key: html.unescape(value) for key, value in _ATTRIBUTE.findall(text)}, text.endswith("/")


class DeepSeekDsml(AttributesParser):
    """DeepSeek since V3.2: <｜DSML｜invoke name="…"><｜DSML｜parameter name="…" string="true">value</｜DSML｜parameter>
    </｜DSML｜invoke> in a section. V4.1 has a space after each ｜DSML｜."""

    calls = ("<｜DSML｜function_calls>", "<｜DSML｜tool_calls>", "<｜DSML｜ calls>")

    def call(self, mark: str) -> Reading[None]:
        space = " " if mark == "<｜DSML｜ calls>" else ""
        yield from self.calls_in(
            calls=(f"<｜DSML｜{space}invoke", f"</｜DSML｜{space}invoke>"),
            arguments=(f"<｜DSML｜{space}parameter", f"</｜DSML｜{space}parameter>"),
            tag_end=">",
            end=f"</{mark[1:]}",
        )


class KimiK3(AttributesParser):
    """Kimi K3: <|open|>call tool="…"<|sep|><|open|>argument key="…" type="string"<|sep|>value<|close|>argument<|sep|>
    <|close|>call<|sep|> in a section, after one of reasoning and one of text."""

    strips = (False, False)
    thinks = (("<|open|>think<|sep|>", "<|close|>think<|sep|>"),)
    thought_ends = ("<|open|>response<|sep|>",)
    frames = ("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>")
    calls = ("<|open|>tools<|sep|>",)
    calls_while_thinking = True

    def call(self, mark: str) -> Reading[None]:
        yield from self.calls_in(
            calls=("<|open|>call", "<|close|>call<|sep|>"),
            arguments=("<|open|>argument", "<|close|>argument<|sep|>"),
            tag_end="<|sep|>",
            end="<|close|>tools<|sep|>",
        )

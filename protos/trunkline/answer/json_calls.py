"""Families that write calls as JSON, or their arguments."""

import re
from collections.abc import Sequence

from trunkline.answer.json_reader import loaded, without_halves
from trunkline.answer.marked_parser import MarkedParser
from trunkline.answer.output_reader import Malformed, Marks, Reading

NAME = re.compile(r"[\w.:/\-]+")


class JsonParser(MarkedParser):
    """Calls are objects with a name and arguments, in any order, alone or in an array."""

    def json_calls(self) -> Reading[None]:
        if (yield from self.peek()) != "[":
            yield from self.json_call()
            return
        yield from self.step("[")
        separator = ","
        while separator == ",":
            yield from self.json_call()
            separator = yield from self._separator("]")
            if separator == ",":
                self.attempt()

    def json_call(self, *, bare: bool = False) -> Reading[None]:
        """bare: nothing but its keys tells the call from other JSON."""
        yield from self.step("{")
        name, call_id, arguments, has_begun = "", "", "", False
        separator = yield from self.sees("}")
        while separator != "}":
            key = yield from self.held_string()
            yield from self.step(":")
            if key == "name" and not name:
                name = yield from self.held_string()
            elif key in ("arguments", "parameters") and not (arguments or has_begun):
                if name and (yield from self.peek()) == "{":
                    self._check_offered(name, bare)
                    self.begin_call(name, call_id)
                    has_begun = True
                    yield from self.value(self.put_arguments)
                else:
                    arguments = yield from self.held_value()
            elif bare and not has_begun and key not in ("type", "id"):
                raise Malformed
            else:
                value = yield from self.held_value()
                call_id = loaded(value) if key == "id" and value.startswith('"') else call_id
            separator = yield from self._separator("}")
        if not has_begun:
            if not arguments and bare:
                raise Malformed
            arguments = _object(arguments or "{}")
            self._check_offered(name, bare)
            self.begin_call(name, call_id)
            self.put_arguments(arguments)
        self.end_call()

    def _separator(self, end: str) -> Reading[str]:
        """Steps over a comma, or over the end, which may be after one. Returns it."""
        if (yield from self.sees(",")) and (yield from self.peek()) != end:
            return ","
        yield from self.step(end)
        return end

    def _check_offered(self, name: str, bare: bool) -> None:
        if bare and name not in self.context.argument_types:
            raise Malformed

    def arguments(self, name: str, call_id: str = "") -> Reading[None]:
        """Reads the arguments of a call, which begins if they are an object."""
        if (yield from self.peek()) != "{":
            raise Malformed
        self.begin_call(name, call_id)
        yield from self.value(self.put_arguments)
        self.end_call()


class Hermes(JsonParser):
    """Hermes, Qwen2.5, Qwen3: <tool_call>{"name": …, "arguments": {…}}</tool_call>"""

    calls = ("<tool_call>",)
    ends = ("</tool_call>",)

    def call(self, mark: str) -> Reading[None]:
        yield from self.json_calls()
        yield from self.sees(*self.ends)


class Granite(JsonParser):
    """Granite: <|tool_call|>[{"name": …, "arguments": {…}}, …]; later models write as Hermes does. Granite 3.2 writes
    reasoning and answer after headings, 3.3 in <think> and <response>."""

    thinks = (
        ("<think>", "</think>"),
        ("Here is my thought process:", "Here is my response:"),
        ("Here's my thought process:", "Here's my response:"),
    )
    frames = ("<response>", "</response>")
    calls = ("<|tool_call|>", "<tool_call>")
    ends = ("</tool_call>",)

    def call(self, mark: str) -> Reading[None]:
        yield from self.json_calls()
        if mark == "<tool_call>":
            yield from self.sees(*self.ends)


class Llama3Json(JsonParser):
    """Llama 3: the whole answer is {"name": …, "parameters": {…}}, and others, perhaps after semicolons. <|python_tag|>
    may precede it; without that mark, only the name of an offered tool tells it from an answer in JSON."""

    strips = (False, False)
    thinks = ()
    calls = ("<|python_tag|>",)
    ends: Sequence[str] = ()

    def start(self) -> Reading[None]:
        if self.context.tools:
            yield from self.attempted("")

    def call(self, mark: str) -> Reading[None]:
        yield from self.json_call(bare=not mark)
        while (separator := (yield from self.sees(";"))) or (yield from self.peek()) == "{":
            self.attempt(separator)
            yield from self.json_call(bare=not mark)


class Mistral(JsonParser):
    """Mistral: [TOOL_CALLS][{"name": …, "arguments": {…}}, …], or since its eleventh tokenizer
    [TOOL_CALLS]name[CALL_ID]id[ARGS]{…} for each call."""

    strips = (False, False)
    thinks = (("[THINK]", "[/THINK]"), ("<think>", "</think>"))
    calls = ("[TOOL_CALLS]",)
    ends = ("</s>",)
    inner = ("[CALL_ID]", "[ARGS]")

    _AFTER_NAME = Marks("[ARGS]", "[CALL_ID]", "{", *calls)
    _AFTER_ID = Marks("[ARGS]", "{", *calls)

    def call(self, mark: str) -> Reading[None]:
        if (yield from self.peek()) in "[{":
            yield from self.json_calls()
            return
        name, after = yield from self.head(self._AFTER_NAME)
        name, call_id = name.strip(), ""
        if after == "[CALL_ID]":
            call_id, after = yield from self.head(self._AFTER_ID)
        if after in self.calls or not NAME.fullmatch(name):
            raise Malformed
        if after == "{":
            self._at -= 1
        yield from self.arguments(name, call_id.strip())


class SectionParser(JsonParser):
    """Calls stand in a section, or alone."""

    call_begin: str
    call_end: str
    section_end: str

    def section_call(self) -> Reading[None]:
        """Reads a call after `call_begin`. Raises Malformed and CutOff."""
        raise NotImplementedError

    def call(self, mark: str) -> Reading[None]:
        if mark == self.call_begin:
            yield from self.section_call()
            yield from self.sees(self.call_end)
            return
        yield from self.section(
            begin=self.call_begin, call=self.section_call, call_end=self.call_end, end=self.section_end
        )


class KimiK2(SectionParser):
    """Kimi K2: <|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{…}<|tool_call_end|> in a section. The
    id of a call has its name."""

    strips = (False, False)
    calls = ("<|tool_calls_section_begin|>", "<|tool_call_begin|>")
    section_end, call_begin, call_end = "<|tool_calls_section_end|>", calls[1], "<|tool_call_end|>"
    ends = (section_end, call_end)
    inner = ("<|tool_call_argument_begin|>",)

    _AFTER_ID = Marks(*inner, *calls, *ends)
    _ID = re.compile(r"(?:functions\.)?(.+?)(?::[0-9]+)?")

    def section_call(self) -> Reading[None]:
        call_id, mark = yield from self.head(self._AFTER_ID, stay=True)
        found = self._ID.fullmatch(call_id.strip())
        if mark not in self.inner or not found:
            raise Malformed
        self._at += len(mark)
        yield from self.arguments(found[1], found[0])


class DeepSeekV3(SectionParser):
    """DeepSeek V3, R1 and V3.1: in a section, <｜tool▁call▁begin｜>function<｜tool▁sep｜>name, then the arguments in a
    block of Markdown; since V3.1 <｜tool▁call▁begin｜>name<｜tool▁sep｜>{…}."""

    calls = ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>")
    call_begin, call_end, section_end = calls[1], "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"
    ends = (section_end, call_end)
    inner = ("<｜tool▁sep｜>",)

    _AFTER_HEAD = Marks(*inner, *calls, *ends)
    _LINE_END = Marks("\n", "<｜", "{")

    def section_call(self) -> Reading[None]:
        name, mark = yield from self.head(self._AFTER_HEAD, stay=True)
        if mark not in self.inner:
            raise Malformed
        self.skip(mark)
        if (yield from self.peek()) != "{":
            name, _ = yield from self.head(self._LINE_END, stay=True)
            if not (yield from self.sees("```")):
                raise Malformed
            yield from self.sees("json")
        yield from self.arguments(name.strip())


def _object(text: str) -> str:
    """Returns arguments that are an object, or a string with one."""
    try:
        value = loaded(text)
        if isinstance(value, str):
            text, value = value, loaded(value)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise Malformed
    return without_halves(text)

"""An answer format for tests: <think>reasoning</think> and, as Hermes models write them, tool calls:
<tool_call>{"name": "…", "arguments": {…}}</tool_call>."""

import json
import re
from collections.abc import Iterable, Sequence
from enum import Enum, auto

from trunkline.answer.answer_parser import AnswerParser
from trunkline.answer.output_reader import NO_CONTEXT, SPACE, AnswerContext
from trunkline.v1.generation_pb2 import FinishReason, ToolCall
from trunkline.v1.inference_pb2 import AnswerPart, ToolCallEnd

TAGGED = "tagged"  # its name
THINK, END_THINK, CALL, END_CALL = "<think>", "</think>", "<tool_call>", "</tool_call>"
HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*(?=\{)')
TAIL = "}" + END_CALL
MAX_HEAD = 256  # characters of a call before its arguments; a longer one is text


class State(Enum):
    TEXT = auto()
    REASONING = auto()
    HEAD = auto()  # of a call, before its arguments
    ARGUMENTS = auto()
    TAIL = auto()  # of a call, after its arguments


class TaggedParser:
    """An AnswerParser. A call whose head does not parse is text, with its tag. So is what follows arguments in place of
    the tag that ends a call."""

    not_plain: str | None = None

    def __init__(self, context: AnswerContext = NO_CONTEXT) -> None:
        self.held = ""  # not yet parsed
        self._state = State.TEXT
        self._num_calls = 0
        self._depth = 0  # of the arguments
        self._is_quoted = self._is_escaped = False

    @classmethod
    def marks(cls) -> Sequence[str]:
        return THINK, END_THINK, CALL, END_CALL

    def feed(self, text: str) -> list[AnswerPart]:
        self.held += text
        return joined(self._parts())

    def finish(self, reason: "FinishReason.ValueType") -> list[AnswerPart]:
        held, self.held = self.held, ""
        if self._state is State.TAIL and not held.strip():
            return []
        if self._state is State.REASONING:
            return [AnswerPart(reasoning=held)] if held else []
        text = CALL + held if self._state is State.HEAD else held
        return [AnswerPart(text=text)] if text else []

    def _parts(self) -> Iterable[AnswerPart]:
        while self.held:
            before = self.held, self._state
            match self._state:
                case State.TEXT:
                    text, tag = self._until(THINK, CALL)
                    yield AnswerPart(text=text)
                    self._state = {THINK: State.REASONING, CALL: State.HEAD}.get(tag, State.TEXT)
                case State.REASONING:
                    text, tag = self._until(END_THINK)
                    yield AnswerPart(reasoning=text)
                    self._state = State.TEXT if tag else State.REASONING
                case State.HEAD:
                    yield from self._head()
                case State.ARGUMENTS:
                    yield from self._arguments()
                case State.TAIL:
                    yield from self._tail()
            if (self.held, self._state) == before:
                return

    def _until(self, *tags: str) -> tuple[str, str]:
        """Takes what comes before the first tag, and the tag; without a tag, what cannot be the beginning of one."""
        found = [(at, tag) for tag in tags if (at := self.held.find(tag)) >= 0]
        if found:
            at, tag = min(found)
            text, self.held = self.held[:at], self.held[at + len(tag) :]
            return text, tag
        longest = max(_overlap(self.held, tag) for tag in tags)
        text, self.held = self.held[: len(self.held) - longest], self.held[len(self.held) - longest :]
        return text, ""

    def _head(self) -> Iterable[AnswerPart]:
        head = HEAD.match(self.held[:MAX_HEAD])
        if head and END_CALL not in head[0] and (name := _string(head[1])):
            self._num_calls += 1
            yield AnswerPart(tool_call=ToolCall(id=f"call-{self._num_calls}", name=name))
            self.held = self.held[head.end() :]
            self._state = State.ARGUMENTS
        elif head or len(self.held) >= MAX_HEAD or END_CALL in self.held:
            yield AnswerPart(text=CALL)
            self._state = State.TEXT

    def _arguments(self) -> Iterable[AnswerPart]:
        for at, character in enumerate(self.held):
            if self._is_quoted:
                self._is_quoted = self._is_escaped or character != '"'
                self._is_escaped = character == "\\" and not self._is_escaped
            elif character == '"':
                self._is_quoted = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if not self._depth:
                    yield AnswerPart(arguments=self.held[: at + 1])
                    yield AnswerPart(tool_call_end=ToolCallEnd())
                    self.held = self.held[at + 1 :]
                    self._state = State.TAIL
                    return
        yield AnswerPart(arguments=self.held)
        self.held = ""

    def _tail(self) -> Iterable[AnswerPart]:
        self.held = self.held.lstrip()
        if self.held.startswith("}"):
            self.held = "}" + self.held[1:].lstrip()
        if self.held.startswith(TAIL):
            self.held = self.held[len(TAIL) :]
            self._state = State.TEXT
        elif not TAIL.startswith(self.held):
            self._state = State.TEXT
        return ()


def _overlap(text: str, tag: str) -> int:
    """The length of the longest end of the text that the tag begins with."""
    return next(length for length in range(min(len(text), len(tag)), -1, -1) if text.endswith(tag[:length]))


def _string(written: str) -> str:
    try:
        value = json.loads(written)
    except ValueError:
        return ""
    return value if value.isprintable() else ""


def answer_parts(
    parser: AnswerParser, outputs: Iterable[str], reason: "FinishReason.ValueType" = FinishReason.FINISH_REASON_STOP
) -> list[AnswerPart]:
    """Returns the parts of a whole answer. What the parser says is text is not fed, as in AnswerParsers."""
    parts, is_plain = list[AnswerPart](), False
    for output in outputs:
        not_plain = parser.not_plain
        is_plain = not_plain is not None and output[-1:] not in SPACE and not set(not_plain) & set(output)
        parts += [AnswerPart(text=output)] if is_plain else parser.feed(output)
    return parts if is_plain else [*parts, *parser.finish(reason)]


def joined(parts: Iterable[AnswerPart]) -> list[AnswerPart]:
    """Returns the parts of one choice, neighbours of one kind as one part and without empty ones."""
    made = list[AnswerPart]()
    for part in parts:
        kind, last = part.WhichOneof("part"), made[-1] if made else AnswerPart()
        if kind in ("text", "reasoning", "arguments") and kind == last.WhichOneof("part"):
            setattr(last, kind, getattr(last, kind) + getattr(part, kind))
        elif kind not in ("text", "reasoning", "arguments") or getattr(part, kind):
            made.append(AnswerPart())
            made[-1].CopyFrom(part)
    return made

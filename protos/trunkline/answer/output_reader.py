"""Reads the output of a choice as it comes, and writes its parts.

A parser of a format is one coroutine over this reader. It reads as if the output were there as a whole, and is
suspended wherever it is not yet, so its parts do not depend on where the output was cut. What may be the head of a call
is an attempt: until it is decided, its text is held, up to MAX_HEAD characters.
"""

import re
import secrets
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TypeVar

from trunkline.answer.argument_types import ArgumentTypes
from trunkline.v1.generation_pb2 import FinishReason, ToolCall
from trunkline.v1.inference_pb2 import AnswerPart, Tool, ToolCallEnd

T = TypeVar("T")
Reading = Generator[None, None, T]  # suspended until there is more output
Write = Callable[[str], None]

MAX_HEAD = 16384  # characters of what may be a call; more are text
MAX_READ_AGAIN = 16 * MAX_HEAD  # characters of an answer that were no call: of more, what may hold calls is text too
MAX_SPACE = 64  # characters of white space that are held back, because they may separate a call from text
SPACE = " \t\r\n"
_NEVER = "(?!)"
_SPACES = re.compile(r"[ \t\r\n]*")


def _new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


@dataclass(frozen=True)
class AnswerContext:
    """What a parser knows of its request.

    tools: that the model may call; without any, calls are text
    prompt_end: the end of the prompt, at least its last marks: an answer continues the reasoning that its prompt begins
    new_call_id: names the calls that the model leaves without a name
    single_tool_call: whether calls after the first one of an answer are left out
    text_stays: whether text that needs no change stays in its chunk and is no part; then chunks have no other text
    """

    tools: Sequence[Tool] = ()
    prompt_end: str = ""
    new_call_id: Callable[[], str] = _new_call_id
    single_tool_call: bool = False
    text_stays: bool = False

    @cached_property
    def argument_types(self) -> Mapping[str, ArgumentTypes]:
        """The types of the arguments of each tool, by its name."""
        return {tool.name: ArgumentTypes(tool) for tool in self.tools}


NO_CONTEXT = AnswerContext()


class Malformed(Exception):
    """The output is not the call that it may have been."""


class CutOff(Exception):
    """The output ended in what was being read."""


class Marks:
    """Strings to find in the output, none of which begins another."""

    def __init__(self, *marks: str) -> None:
        self.pattern = re.compile("|".join(map(re.escape, marks)) or _NEVER)
        self._beginnings = {mark[:length] for mark in marks for length in range(1, len(mark))}
        self._most_held = max(map(len, marks), default=1) - 1
        self.firsts = "".join(sorted({mark[0] for mark in marks}))
        self.first = re.compile(f"[{re.escape(self.firsts)}]" if marks else _NEVER)

    @staticmethod
    @lru_cache(256)
    def of(*marks: str) -> "Marks":
        """As Marks(), but made once."""
        return Marks(*marks)

    def begin_in(self, text: str, start: int) -> int:
        """Returns where the end of a text may be the beginning of a mark; its length if nowhere."""
        at = max(start, len(text) - self._most_held)
        while found := self.first.search(text, at):
            if text[found.start() :] in self._beginnings:
                return found.start()
            at = found.end()
        return len(text)


class Prose:
    """Text or reasoning. With `strips`, white space beside marks is left out, as templates put it there."""

    def __init__(self, put: Write, *, strips: bool, after_mark: bool = False) -> None:
        self._put = put
        self._strips = strips
        self._after_mark = after_mark
        self._space = ""
        self.is_blank = True  # nothing but white space was written

    @property
    def is_within(self) -> bool:
        """Whether write() writes text as it is, unless it ends in white space, and changes nothing else."""
        return not (self.is_blank or self._space or self._after_mark)

    def write(self, text: str) -> None:
        if not (self._space or self._after_mark or text[-1:] in SPACE):
            self.is_blank = False
            self._put(text)
            return
        self.is_blank = self.is_blank and not text.strip(SPACE)
        if not self._strips:
            self._put(text)
            return
        text = self._space + text
        if self._after_mark:
            text = text.lstrip(SPACE)
            self._after_mark = not text
        num_space = min(len(text) - len(text.rstrip(SPACE)), MAX_SPACE)
        self._put(text[: len(text) - num_space])
        self._space = text[len(text) - num_space :]

    def mark(self) -> None:
        """A mark begins or ends here."""
        self._space, self._after_mark = "", self._strips

    def end(self) -> None:
        self._put(self._space)
        self._space = ""


class OutputReader:
    """An AnswerParser whose subclasses read with the methods below.

    strips: whether white space between text or reasoning and marks is left out: (text, reasoning)
    """

    strips = (True, True)

    def __init__(self, context: AnswerContext) -> None:
        self.context = context
        self.not_plain: str | None = None
        self._text = ""  # not yet read from _at on; from _attempt on if there is one
        self._at = 0
        self._attempt: int | None = None
        self._attempt_mark = ""
        self._num_read_again = 0
        self._waits: tuple[Marks, Write] | None = None  # for the next mark, and all text before it has been written
        self._reason: FinishReason.ValueType | None = None
        self._parts: list[tuple[str, list[str]]] = []
        self.prose = self._text_prose = Prose(self._put_text, strips=self.strips[0])
        self._reading = self._read()
        next(self._reading)

    def feed(self, text: str) -> list[AnswerPart]:
        if not text:
            return []
        if self._waits is not None:
            marks, write = self._waits
            if not marks.first.search(text):  # as most text: what follows would do the same
                write(text)
                return self._taken()
            self._waits = None
        start = self._at if self._attempt is None else self._attempt
        self._text = self._text[start:] + text
        self._at -= start
        if self._attempt is not None:
            self._attempt = 0
        next(self._reading)
        return self._taken()

    def finish(self, reason: "FinishReason.ValueType") -> list[AnswerPart]:
        self._reason = reason
        next(self._reading, None)
        return self._taken()

    @property
    def num_held(self) -> int:
        """How many characters are not yet parts, but for what is held of a value."""
        return len(self._text) - (self._at if self._attempt is None else self._attempt)

    def read(self) -> Reading[None]:
        """Reads the output to its end. Subclasses define it."""
        raise NotImplementedError

    def _read(self) -> Reading[None]:
        yield  # the first output starts it
        try:
            yield from self.read()
        except CutOff:
            self.cut_off()
        self.prose.end()

    # Writing.

    def _taken(self) -> list[AnswerPart]:
        waits, text = self._waits, self._text_prose
        self.not_plain = waits[0].firsts if waits and waits[1] == text.write and text.is_within else None
        parts, self._parts = self._parts, []
        return [_part(kind, texts) for kind, texts in parts]

    def _put(self, kind: str, text: str) -> None:
        if not text:
            return
        if self._parts and self._parts[-1][0] == kind:
            self._parts[-1][1].append(text)
        else:
            self._parts.append((kind, [text]))

    def _put_text(self, text: str) -> None:
        self._put("text", text)

    def put_reasoning(self, text: str) -> None:
        self._put("reasoning", text)

    def put_arguments(self, text: str) -> None:
        self._put("arguments", text)

    def begin_call(self, name: str, call_id: str = "") -> None:
        """A call is certain. Raises Malformed if its head was too long, or its name is none."""
        if not name.isprintable() or not name.strip():
            raise Malformed
        self.decided()
        self._parts.append(("tool_call", [name, call_id or self.context.new_call_id()]))

    def end_call(self) -> None:
        self._parts.append(("tool_call_end", []))

    def rest_of_call(self, marks: Marks) -> Reading[str]:
        """After a malformed call, leaves out what comes before a mark. If the call had begun, it has no end, and the
        arguments before the fault: clients can read these so far."""
        return (yield from self.until(marks, leave_out, stay=True))

    # Attempts.

    def attempt(self, mark: str = "") -> None:
        """What comes, with the mark that was just read, may be a call."""
        self._attempt, self._attempt_mark = self._at - len(mark), mark

    def decided(self) -> None:
        """It is. Raises Malformed if it was too long."""
        self._check_head()
        self._attempt = None
        self.prose.mark()

    def refused(self) -> bool:
        """What was attempted is no call: its mark is text, and what comes after the mark is read again. Returns whether
        there was an attempt."""
        if self._attempt is None:
            return False
        self._num_read_again += min(self._at - self._attempt, MAX_HEAD)
        if self._num_read_again > MAX_READ_AGAIN:
            return self.attempted_is_text()
        self._rewind(self._attempt + len(self._attempt_mark))
        self.prose.write(self._attempt_mark)
        return True

    def attempted_is_text(self) -> bool:
        """What was attempted is no call, nor is what was read of it. Returns whether there was an attempt."""
        if self._attempt is None:
            return False
        self._at = min(self._at, self._attempt + MAX_HEAD)  # how far it was read beyond that depends on cuts
        self.prose.write(self._text[self._attempt : self._at])
        self._attempt = None
        return True

    def again(self) -> None:
        """What was attempted is read again, with its mark."""
        if self._attempt is not None:
            self._rewind(self._attempt)

    def _rewind(self, at: int) -> None:
        self._at, self._attempt = at, None

    def cut_off(self) -> None:
        """The output ended. What was attempted is text, unless the limit of tokens cut it off."""
        if self._attempt is not None:
            if self._reason == FinishReason.FINISH_REASON_LENGTH:
                self.prose.mark()
            else:
                self.prose.write(self._text[self._attempt :])
        self._attempt = None
        self._at = len(self._text)

    def _check_head(self) -> None:
        if self._attempt is not None and self._at - self._attempt > MAX_HEAD:
            raise Malformed

    # Reading.

    def more(self) -> Reading[None]:
        """Waits for more output. Raises CutOff if there is none, and Malformed if an attempt is too long."""
        self._check_head()
        if self._reason is not None:
            raise CutOff
        yield

    def until(self, marks: Marks, write: Write, *, stay: bool = False) -> Reading[str]:
        """Writes what comes before the first mark, and steps over the mark unless it should stay. Returns the mark; ""
        at the end of the output."""
        while True:
            found = marks.pattern.search(self._text, self._at)
            if found:
                write(self._text[self._at : found.start()])
                self._at = found.start() if stay else found.end()
                return found[0]
            end = marks.begin_in(self._text, self._at)
            write(self._text[self._at : end])
            self._at = end
            if end == len(self._text) and self._attempt is None:
                self._waits = marks, write
            try:
                yield from self.more()
            except CutOff:
                write(self._text[self._at :])
                self._at = len(self._text)
                return ""

    def head(self, marks: Marks, *, stay: bool = False) -> Reading[tuple[str, str]]:
        """Returns what comes before the first mark, and the mark. Raises CutOff if there is none."""
        read = list[str]()
        mark = yield from self.until(marks, read.append, stay=stay)
        if not mark:
            raise CutOff
        return "".join(read), mark

    def sees(self, *options: str) -> Reading[str]:
        """Steps over one of the options, and over a little white space before it. Returns it; "" if none is next.
        Raises CutOff if the output ends before that is known."""
        while True:
            start = min(_end_of_space(self._text, self._at), self._at + MAX_SPACE)
            for option in options:
                if self._text.startswith(option, start):
                    self._at = start + len(option)
                    return option
            rest = self._text[start : start + MAX_SPACE]
            if not any(option.startswith(rest) for option in options):
                return ""
            yield from self.more()

    def skip(self, mark: str) -> None:
        """Steps over a mark that is next."""
        self._at += len(mark)

    def follows(self, skipped: int, options: Sequence[str]) -> Reading[bool]:
        """Returns whether one of the options, if there are any, follows after so many characters and a little white
        space. "" stands for the end of an output that the model ended itself. Steps over nothing."""
        while True:
            start = self._at + skipped
            start = min(_end_of_space(self._text, start), start + MAX_SPACE)
            if any(option and self._text.startswith(option, start) for option in options):
                return True
            rest = self._text[start : start + MAX_SPACE]
            if not any(option.startswith(rest) for option in options):
                return not options
            try:
                yield from self.more()
            except CutOff:
                return not rest and "" in options and self._reason != FinishReason.FINISH_REASON_LENGTH

    def peek(self, write: Write | None = None) -> Reading[str]:
        """Returns the next character that is not white space, and stays before it. Raises CutOff."""
        while True:
            start, self._at = self._at, _end_of_space(self._text, self._at)
            if write is not None:
                write(self._text[start : self._at])
            if self._at < len(self._text):
                return self._text[self._at]
            yield from self.more()

    def step(self, character: str) -> Reading[None]:
        """Steps over a character, and over white space before it. Raises Malformed if another is next."""
        if (yield from self.peek()) != character:
            raise Malformed
        self._at += 1


def leave_out(text: str) -> None:
    """Writes nothing."""


def _end_of_space(text: str, start: int) -> int:
    found = _SPACES.match(text, start)
    return start if found is None else found.end()


def _part(kind: str, texts: list[str]) -> AnswerPart:
    match kind:
        case "text":
            return AnswerPart(text="".join(texts))
        case "reasoning":
            return AnswerPart(reasoning="".join(texts))
        case "arguments":
            return AnswerPart(arguments="".join(texts))
        case "tool_call":
            return AnswerPart(tool_call=ToolCall(name=texts[0], id=texts[1]))
        case _:
            return AnswerPart(tool_call_end=ToolCallEnd())

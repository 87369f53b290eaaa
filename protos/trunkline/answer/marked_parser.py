"""Answers whose reasoning and calls stand between marks: <think>…</think>, <tool_call>…"""

from collections.abc import Callable, Sequence

from trunkline.answer.json_reader import JsonReader
from trunkline.answer.output_reader import SPACE, AnswerContext, CutOff, Malformed, Marks, Prose, Reading, leave_out


class MarkedParser(JsonReader):
    """Reads text, reasoning and calls in turn. A family is a subclass with its marks and `call`.

    thinks: marks around reasoning, which is at the beginning of an answer; the prompt may have the first mark
    thought_ends: further marks that end reasoning
    frames: marks around text that are left out
    calls: marks that begin a call, or a section of calls
    ends: marks that end one that is malformed
    inner: further marks, which stand in calls or around them
    calls_while_thinking: whether a call also ends reasoning; otherwise its marks in reasoning are text
    """

    thinks: Sequence[tuple[str, str]] = (("<think>", "</think>"),)
    thought_ends: Sequence[str] = ()
    frames: Sequence[str] = ()
    calls: Sequence[str] = ()
    ends: Sequence[str] = ()
    inner: Sequence[str] = ()
    calls_while_thinking = False

    def __init__(self, context: AnswerContext) -> None:
        super().__init__(context)
        self._calls = self.calls if context.tools else ()
        self._end_marks = Marks.of(*self.ends, *self.calls)

    @classmethod
    def marks(cls) -> list[str]:
        thinks = [mark for pair in cls.thinks for mark in pair]
        return [*thinks, *cls.thought_ends, *cls.frames, *cls.calls, *cls.ends, *cls.inner]

    def call(self, mark: str) -> Reading[None]:
        """Reads a call after its mark, or a section of calls. Raises Malformed and CutOff."""
        raise NotImplementedError

    def start(self) -> Reading[None]:
        """Reads what only stands at the beginning of an answer."""
        prompt_end = self.context.prompt_end.rstrip(SPACE)
        for begin, end in self.thinks:
            if prompt_end.endswith(begin):
                yield from self._think(end)

    def read(self) -> Reading[None]:
        yield from self.start()
        ends = dict(self.thinks)
        marks = Marks.of(*ends, *self.frames, *self._calls)
        while mark := (yield from self.until(marks, self.prose.write)):
            if mark in self.frames:
                continue
            if mark in self._calls:
                yield from self.attempted(mark)
            elif self.prose.is_blank:
                self.prose.mark()
                yield from self._think(ends[mark])
            else:
                self.prose.write(mark)

    def attempted(self, mark: str) -> Reading[None]:
        """Reads what may be a call; otherwise it is text."""
        self.attempt(mark)
        try:
            yield from self.call(mark)
        except CutOff:
            self.cut_off()
        except Malformed:
            if not self.refused():
                end = yield from self.rest_of_call(self._end_marks)
                if end in self.ends:
                    self.skip(end)

    def section(self, *, begin: str, call: Callable[[], Reading[None]], call_end: str, end: str) -> Reading[None]:
        """Reads a section of calls, each after its mark. What else stands there is left out. Raises Malformed if there
        is no call, unless the section is empty, and CutOff.

        begin, call, call_end: the mark of a call, what reads it, and the mark after it
        end: the mark at the section's end
        """
        marks, rest = Marks.of(begin, end), Marks.of(begin, call_end, end)
        while (mark := (yield from self.until(marks, leave_out))) == begin:
            try:
                yield from call()
            except Malformed:
                yield from self.rest_of_call(rest)
        if self._attempt is not None:
            if not mark:
                raise CutOff
            if self._text[self._attempt + len(self._attempt_mark) : self._at - len(mark)].strip(SPACE):
                raise Malformed
            self.decided()

    def _think(self, end: str) -> Reading[None]:
        thought = Prose(self.put_reasoning, strips=self.strips[1], after_mark=True)
        ends = (end, *self.thought_ends)
        marks = Marks.of(*ends, *(self._calls if self.calls_while_thinking else ()))
        text, self.prose = self.prose, thought  # what is refused while thinking is a thought
        while mark := (yield from self.until(marks, thought.write)):
            if mark in ends:
                break
            self.attempt(mark)
            if (yield from self.begins_call(mark)):
                self.again()
                break
            self.refused()
        if not mark:
            thought.end()
        self.prose = text
        text.mark()

    def begins_call(self, mark: str) -> Reading[bool]:
        """Returns whether a call follows its mark, where marks in reasoning may be text."""
        yield from ()
        return True

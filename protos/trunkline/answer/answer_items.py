"""What the parts of an answer add up to: runs of text and of reasoning, and tool calls. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from trunkline.v1.inference_pb2 import AnswerPart

TEXT, REASONING, TOOL_CALL = "text", "reasoning", "tool_call"
BETWEEN_RUNS = "\n"


@dataclass(slots=True)
class AnswerItem:
    """A run of text, a run of reasoning, or a tool call.

    kind: TEXT, REASONING or TOOL_CALL
    call_id, name: of a call
    is_complete: whether a call has ended. One that was cut off must not be run: its arguments may be no JSON.
    """

    kind: str
    call_id: str = ""
    name: str = ""
    is_complete: bool = False
    _texts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The text so far; of a call its arguments."""
        return "".join(self._texts)

    def add(self, text: str) -> None:
        self._texts.append(text)


class AnswerItems:
    """The items of one choice so far, in order."""

    __slots__ = ("items",)

    def __init__(self) -> None:
        self.items = list[AnswerItem]()

    def take(self, part: AnswerPart) -> bool:
        """Takes the next part of the choice. Returns whether an item begins with it. The part belongs to the last
        item then and otherwise too."""
        kind, items = part.WhichOneof("part"), self.items
        if kind == "tool_call":
            call = part.tool_call
            items.append(AnswerItem(TOOL_CALL, call.id, call.name))
            items[-1].add(call.arguments)
            return True
        if kind == "tool_call_end":
            items[-1].is_complete = True
            return False
        if kind == "arguments":
            items[-1].add(part.arguments)
            return False
        return self._add(REASONING, part.reasoning) if kind == "reasoning" else self.add_text(part.text)

    def add_text(self, text: str) -> bool:
        """As take(), for text."""
        return self._add(TEXT, text)

    def _add(self, kind: str, text: str) -> bool:
        begins = not self.items or self.items[-1].kind != kind
        if begins:
            self.items.append(AnswerItem(kind))
        self.items[-1].add(text)
        return begins

    @property
    def text(self) -> str:
        """All text, as a JoinedText has it."""
        return BETWEEN_RUNS.join(item.text for item in self.items if item.kind == TEXT)

    @property
    def calls(self) -> list[AnswerItem]:
        return [item for item in self.items if item.kind == TOOL_CALL]


class JoinedText:
    """The text of a choice as one, where a reader gets it apart from reasoning and calls. A line break stands between
    runs of text that have these between them."""

    __slots__ = ("_before", "_continues")

    def __init__(self) -> None:
        self._before = ""  # the next run
        self._continues = False  # whether the last part was text

    def of(self, text: str) -> str:
        """Returns what the next part of the choice adds to it, by its text; "": it is no text."""
        if text and not self._continues:
            text, self._before = self._before + text, BETWEEN_RUNS
        self._continues = text != ""
        return text


def calls_tools(items: Iterable[AnswerItem]) -> bool:
    """Whether a program should run the calls: there are some, and all are complete. Programs run every call that a
    stream has begun, so one that was cut off or is malformed keeps them from running any."""
    calls = [item for item in items if item.kind == TOOL_CALL]
    return bool(calls) and all(call.is_complete for call in calls)

"""The items of a response's input: messages, and what earlier answers and tools have said."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, NoReturn

from pydantic import Discriminator, Field, GetJsonSchemaHandler, Tag, TypeAdapter
from pydantic.json_schema import JsonSchemaValue

from trunkline.status import invalid
from trunkline.v1.inference_pb2 import ChatMessage
from trunkline_router.edge.chat_messages import (
    Piece,
    TextOrList,
    Turn,
    call_part,
    chat_message,
    pieces,
    reasoning_part,
    result_part,
)
from trunkline_router.edge.openai.chat_fields import Part
from trunkline_router.edge.request_fields import NOT_YET, STEP_ITEMS, Fields, Steps, json_text
from trunkline_router.edge.tool_fields import INPUT, ONLY_FUNCTIONS, ToolName
from trunkline_router.prompts.conversation import ASSISTANT, JOINT, MAX_MESSAGES, TOOL

# Of items that come back as they were answered.
AS_ANSWERED = frozenset({"id", "status", "phase", "caller"})
INCOMPLETE = "incomplete"  # the status of a call that was cut off


class InputPart(Part):
    """A part of a message's content."""

    def unknown(self, prefix: str = "") -> list[str]:
        self.piece(prefix.removesuffix("."))  # other kinds have other fields: the kind is what is not served
        return super().unknown(prefix)


class MessageItem(Fields):
    """A message, with or without a type."""

    type: Literal["message"] | None = None
    role: Literal["developer", "system", "user", "assistant"]
    content: TextOrList[InputPart]
    ignored: ClassVar[frozenset[str]] = AS_ANSWERED

    def turn(self, where: str) -> Turn:
        return self.role, pieces(self.content, f"{where}.content")


class CallItem(Fields):
    """A call of a function in an earlier answer."""

    type: Literal["function_call"]
    call_id: str
    name: ToolName
    arguments: str
    status: str | None = None
    ignored: ClassVar[frozenset[str]] = AS_ANSWERED | {"parsed_arguments"}  # the latter is of openai's parse()

    def turn(self, where: str) -> Turn:
        return ASSISTANT, [call_part(self.call_id, self.name, self.arguments)]


class CustomCallItem(Fields):
    """A call of a custom tool in an earlier answer.  input: a text"""

    type: Literal["custom_tool_call"]
    call_id: str
    name: ToolName
    input: str
    status: str | None = None
    ignored: ClassVar[frozenset[str]] = AS_ANSWERED

    def turn(self, where: str) -> Turn:
        return ASSISTANT, [call_part(self.call_id, self.name, json_text({INPUT: self.input}, f"{where}.input"))]


class ResultItem(Fields):
    """What a tool returned."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: TextOrList[InputPart]
    ignored: ClassVar[frozenset[str]] = AS_ANSWERED

    def turn(self, where: str) -> Turn:
        return TOOL, [result_part(self.call_id, pieces(self.output, f"{where}.output"))]


class ReasoningText(Fields):
    """A part of reasoning, or of its summary."""

    type: Literal["reasoning_text", "summary_text", "text"]
    text: str


ReasoningTexts = Annotated[list[ReasoningText], Field(fail_fast=True, max_length=MAX_MESSAGES)]


class ReasoningItem(Fields):
    """What the model thought before an earlier answer. Without its content, the summary stands for it."""

    type: Literal["reasoning"]
    content: ReasoningTexts | None = None
    summary: ReasoningTexts | None = None
    ignored: ClassVar[frozenset[str]] = AS_ANSWERED | {"encrypted_content"}

    def turn(self, where: str) -> Turn:
        text = JOINT.join(part.text for part in self.content or self.summary or ())
        return ASSISTANT, [reasoning_part(text)] if text else []


class ReferenceItem(Fields):
    """An item of a stored response, which takes its place. It may have no type."""

    type: Literal["item_reference"] | None = None
    id: str

    def turn(self, where: str) -> NoReturn:
        raise invalid(f"{where}.id", "no stored response has this item: send the item itself")


class OtherItem(Fields):
    """An item that is not served. It has other fields, so its kind is what is refused."""

    type: str

    def unknown(self, prefix: str = "") -> list[str]:
        self.turn(prefix.removesuffix("."))

    def turn(self, where: str) -> NoReturn:
        kind = self.type[:32]
        raise invalid(f"{where}.type", f"{kind!r} {ONLY_FUNCTIONS if 'call' in kind or 'mcp' in kind else NOT_YET}")

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: Any, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """The schema fits no item, because none is served."""
        return {"not": {}}


KINDS = ("message", "function_call", "custom_tool_call", "function_call_output", "reasoning", "item_reference")


def kind_of(item: object) -> str:
    """The tag of an item. Errors leave it out of the names of fields."""
    kind = item.get("type") if isinstance(item, dict) else getattr(item, "type", None)
    if not kind:
        is_reference = isinstance(item, dict) and "id" in item and not item.keys() & {"role", "content"}
        kind = "item_reference" if is_reference else "message"
    if kind == "custom_tool_call_output":
        kind = "function_call_output"
    return f"[{kind}]" if isinstance(kind, str) and kind in KINDS else "[]"


InputItem = Annotated[
    Annotated[MessageItem, Tag("[message]")]
    | Annotated[CallItem, Tag("[function_call]")]
    | Annotated[CustomCallItem, Tag("[custom_tool_call]")]
    | Annotated[ResultItem, Tag("[function_call_output]")]
    | Annotated[ReasoningItem, Tag("[reasoning]")]
    | Annotated[ReferenceItem, Tag("[item_reference]")]
    | Annotated[OtherItem, Tag("[]")],
    Discriminator(kind_of),
]


INPUT_ITEM: TypeAdapter[InputItem] = TypeAdapter(InputItem)


@dataclass(slots=True)
class InputTurn:
    """A turn that items have made: what the assistant said and called in a row is one, as it was answered.

    items: the index of the item that each piece comes from
    """

    role: str
    pieces: list[Piece] = field(default_factory=list)
    items: list[int] = field(default_factory=list)

    def message(self) -> ChatMessage:
        return chat_message(self.role, self.pieces)


def turns_of(items: Iterable[InputItem], cut_off: Iterable[str] = ()) -> Steps[Sequence[InputTurn]]:
    """Returns the turns of a list of items. A call that was cut off is left out, with its result: no template could
    write its arguments. Raises RequestRefused (INVALID_REQUEST).

    cut_off: ids of such calls before the items
    """
    turns: list[InputTurn] = []
    left_out = set(cut_off)
    for index, item in enumerate(items):
        if index % STEP_ITEMS == STEP_ITEMS - 1:
            yield
        if isinstance(item, CallItem | CustomCallItem):
            if item.status == INCOMPLETE:
                left_out.add(item.call_id)
            else:  # a later answer may use an id again
                left_out.discard(item.call_id)
        if isinstance(item, CallItem | CustomCallItem | ResultItem) and item.call_id in left_out:
            continue
        role, content = item.turn(f"input[{index}]")
        if not turns or turns[-1].role != role or role != ASSISTANT:
            turns.append(InputTurn(role))
        found = [content] if isinstance(content, str) else content
        turns[-1].pieces += found
        turns[-1].items += [index] * len(found)
    return [turn for turn in turns if turn.pieces or turn.role != ASSISTANT]

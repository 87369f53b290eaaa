"""Messages of all protocols become messages of the contract here.

A protocol's own classes tell the pieces of a message: `piece()` of each part of a content returns it, or refuses the
part by name.
"""

from collections.abc import Iterable, Sequence
from typing import Annotated, Protocol, TypeVar

from pydantic import Discriminator, Field, Tag

from trunkline.v1.inference_pb2 import ChatMessage, ChatPart, ToolResult
from trunkline_router.prompts.conversation import JOINT, MAX_PARTS

# Templates know "system", which developers' instructions were called before.
ROLES = {"developer": "system"}

Piece = str | ChatPart  # a text, or a part of another kind
Turn = tuple[str, str | Sequence[Piece]]  # a message's role and content


def text_or_list(value: object) -> str:
    """The tag of a text or of a list. Errors leave it out of the names of fields."""
    return "str" if isinstance(value, str) else "list[]"


Item = TypeVar("Item")
# A content, or a text in the place of a conversation.
TextOrList = Annotated[
    Annotated[str, Tag("str")] | Annotated[list[Item], Field(fail_fast=True, max_length=MAX_PARTS), Tag("list[]")],
    Discriminator(text_or_list),
]


class ContentPart(Protocol):
    """A part of a content, in one of the protocols."""

    def piece(self, where: str) -> Piece:
        """Returns what the part is. Raises RequestRefused (INVALID_REQUEST) if it is not served.

        where: the part's field
        """


def pieces(content: str | Sequence[ContentPart] | None, where: str) -> str | Sequence[Piece]:
    """Returns what a content consists of. Raises RequestRefused (INVALID_REQUEST).  where: the content's field"""
    if isinstance(content, str):
        return content
    return [part.piece(f"{where}[{index}]") for index, part in enumerate(content or ())]


def chat_message(role: str, content: str | Sequence[Piece]) -> ChatMessage:
    """Returns a message. Texts alone are joined, as for the template, so the usual message stays short."""
    role = ROLES.get(role, role)
    if isinstance(content, str):
        return ChatMessage(role=role, content=content)
    try:
        return ChatMessage(role=role, content=JOINT.join(content))  # type: ignore[arg-type]
    except TypeError:  # one of them is no text
        parts = [ChatPart(text=piece) if isinstance(piece, str) else piece for piece in content]
        return ChatMessage(role=role, parts=parts)


def result_part(call_id: str | None, content: str | Sequence[Piece], name: str | None = None) -> ChatPart:
    """Returns what a tool returned.  name: the tool's, if the protocol has it there"""
    text = content if isinstance(content, str) else JOINT.join(content)  # type: ignore[arg-type]  # parts are texts
    return ChatPart(tool_result=ToolResult(call_id=call_id or "", name=name or "", content=text))


def merged(turns: Iterable[Turn]) -> list[ChatMessage]:
    """Returns the messages, those of one role in a row as one, because many templates refuse them."""
    gathered: list[tuple[str, list[Piece]]] = []
    for role, content in turns:
        if not gathered or gathered[-1][0] != role:
            gathered.append((role, []))
        gathered[-1][1].extend([content] if content and isinstance(content, str) else content)
    return [chat_message(role, content) for role, content in gathered]

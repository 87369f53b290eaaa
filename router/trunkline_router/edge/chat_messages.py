"""Messages of all protocols become messages of the contract here.

A protocol's own classes tell the pieces of a message: `piece()` of each part of a content returns it, or refuses the
part by name. Parts and messages are told as the fields of theirs, because protobuf takes a third of the time to make
nested messages of fields: a message that is put into another one is copied.
"""

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Protocol, TypeVar

from pydantic import Discriminator, Field, Tag

from trunkline.v1.inference_pb2 import ChatMessage
from trunkline_router.prompts.conversation import JOINT, MAX_PARTS

# Templates know "system", which developers' instructions were called before.
ROLES = {"developer": "system"}

PartFields = dict[str, Any]  # of a ChatPart
MessageFields = dict[str, Any]  # of a ChatMessage
Piece = str | PartFields  # a text, or a part of another kind
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


def message_fields(role: str, content: str | Sequence[Piece]) -> MessageFields:
    """Returns a message. Texts alone are joined, as for the template, so the usual message stays short."""
    role = ROLES.get(role, role)
    if isinstance(content, str):
        return {"role": role, "content": content}
    if {*map(type, content)} <= {str}:
        return {"role": role, "content": JOINT.join(content)}  # type: ignore[arg-type]
    return {"role": role, "parts": [{"text": piece} if isinstance(piece, str) else piece for piece in content]}


def chat_message(role: str, content: str | Sequence[Piece]) -> ChatMessage:
    """Returns a message that is kept by itself."""
    return ChatMessage(**message_fields(role, content))


def call_part(call_id: str | None, name: str, arguments: str) -> PartFields:
    """Returns a call of a tool.  arguments: a JSON object, which is parsed where conversations are rendered"""
    return {"tool_call": {"id": call_id or "", "name": name, "arguments": arguments}}


def result_part(call_id: str | None, content: str | Sequence[Piece], name: str | None = None) -> PartFields:
    """Returns what a tool returned.  name: the tool's, if the protocol has it there"""
    text = content if isinstance(content, str) else JOINT.join(content)  # type: ignore[arg-type]  # parts are texts
    return {"tool_result": {"call_id": call_id or "", "name": name or "", "content": text}}


def reasoning_part(text: str) -> PartFields:
    """Returns what the model thought."""
    return {"reasoning": text}


def merged(turns: Iterable[Turn]) -> list[MessageFields]:
    """Returns the messages, those of one role in a row as one, because many templates refuse them."""
    gathered: list[tuple[str, list[Piece]]] = []
    for role, content in turns:
        if not gathered or gathered[-1][0] != role:
            gathered.append((role, []))
        gathered[-1][1].extend([content] if content and isinstance(content, str) else content)
    return [message_fields(role, content) for role, content in gathered]

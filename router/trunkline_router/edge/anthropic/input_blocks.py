"""The content blocks of a conversation."""

from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Tag

from trunkline.status import invalid
from trunkline_router.edge.chat_messages import Piece, TextOrList, call_part, reasoning_part, result_part
from trunkline_router.edge.request_fields import Fields, json_text
from trunkline_router.edge.tool_fields import ToolName
from trunkline_router.prompts.conversation import ASSISTANT, TEXT_ALONE

SERVER_TOOLS = "is not supported: tools run at the client alone"
# Kinds that are not served, beside images, documents and other media, with the reasons.
KINDS = dict.fromkeys(("server_tool_use", "mcp_tool_use", "mcp_tool_result", "tool_reference"), SERVER_TOOLS)


class Block(Fields):
    """A part of a content, of a kind that is not served."""

    type: str

    ignored: ClassVar[frozenset[str]] = frozenset({"cache_control"})  # the cache here needs no marks
    role: ClassVar[str | None] = None  # of messages that may have it; None: all

    def unknown(self, prefix: str = "") -> list[str]:
        if type(self) is Block:  # other kinds have other fields: the kind is what is not served
            self.piece(prefix.removesuffix("."))
        return super().unknown(prefix)

    def piece(self, where: str) -> Piece | None:
        """Returns what the block is for the template. Raises RequestRefused (INVALID_REQUEST) if it is not served.

        where: the block's field
        """
        kind = self.type[:32]
        raise invalid(where, f"content of type {kind!r} {KINDS.get(kind, TEXT_ALONE)}")


class TextBlock(Block):
    """A text."""

    type: Literal["text"]
    text: str

    ignored: ClassVar[frozenset[str]] = Block.ignored | {"citations"}

    def piece(self, where: str) -> Piece | None:
        return self.text


class ToolUseBlock(Block):
    """A call of a tool in an earlier answer."""

    type: Literal["tool_use"]
    id: str
    name: ToolName
    input: dict[str, Any]

    ignored: ClassVar[frozenset[str]] = Block.ignored | {"caller"}
    role: ClassVar[str | None] = ASSISTANT

    def piece(self, where: str) -> Piece | None:
        return call_part(self.id, self.name, json_text(self.input, f"{where}.input"))


class ToolReferenceBlock(Block):
    """A tool that a client's search for tools has found. The model reads its name, and may call it from here on."""

    type: Literal["tool_reference"]
    tool_name: ToolName

    def piece(self, where: str) -> Piece | None:
        return self.tool_name


class ThinkingBlock(Block):
    """What the model thought in an earlier answer."""

    type: Literal["thinking"]
    thinking: str

    ignored: ClassVar[frozenset[str]] = Block.ignored | {"signature"}
    role: ClassVar[str | None] = ASSISTANT

    def piece(self, where: str) -> Piece | None:
        return reasoning_part(self.thinking) if self.thinking else None


class RedactedThinkingBlock(Block):
    """What a model of Anthropic's thought. It is left out, because other models cannot read it."""

    type: Literal["redacted_thinking"]

    ignored: ClassVar[frozenset[str]] = Block.ignored | {"data"}
    role: ClassVar[str | None] = ASSISTANT

    def piece(self, where: str) -> Piece | None:
        return None


def _tag_among(*kinds: str) -> Callable[[Any], str]:
    """Returns what gives the tag of a block's kind. Errors leave it out of the names of fields."""

    def tag(block: Any) -> str:
        kind = block.get("type") if isinstance(block, dict) else getattr(block, "type", None)
        return f"[{kind}]" if kind in kinds else "[]"

    return tag


_Text = Annotated[TextBlock, Tag("[text]")]
_Found = Annotated[ToolReferenceBlock, Tag("[tool_reference]")]
_Other = Annotated[Block, Tag("[]")]
Texts = TextOrList[Annotated[_Text | _Other, Discriminator(_tag_among("text"))]]
Results = TextOrList[Annotated[_Text | _Found | _Other, Discriminator(_tag_among("text", "tool_reference"))]]


class ToolResultBlock(Block):
    """What a tool returned."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Results | None = None

    # Whether the tool failed: models read it in the content.
    ignored: ClassVar[frozenset[str]] = Block.ignored | {"is_error"}
    role: ClassVar[str | None] = "user"

    def piece(self, where: str) -> Piece | None:
        return result_part(self.tool_use_id, pieces_of(self.content, "", f"{where}.content"))


Blocks = TextOrList[
    Annotated[
        _Text
        | Annotated[ToolUseBlock, Tag("[tool_use]")]
        | Annotated[ToolResultBlock, Tag("[tool_result]")]
        | Annotated[ThinkingBlock, Tag("[thinking]")]
        | Annotated[RedactedThinkingBlock, Tag("[redacted_thinking]")]
        | _Other,
        Discriminator(_tag_among("text", "tool_use", "tool_result", "thinking", "redacted_thinking")),
    ]
]


def pieces_of(content: str | Sequence[Block] | None, role: str, where: str) -> str | list[Piece]:
    """Returns what a content consists of. Raises RequestRefused (INVALID_REQUEST).

    role: of its message;  where: the content's field
    """
    if isinstance(content, str):
        return content
    found = list[Piece]()
    for index, block in enumerate(content or ()):
        field = f"{where}[{index}]"
        if block.role not in (None, role):
            raise invalid(field, f"content of type {block.type!r} is only allowed in messages of {block.role!r}")
        if (piece := block.piece(field)) is not None:
            found.append(piece)
    return found


def references(content: str | Sequence[Block]) -> Iterator[str]:
    """Yields the names of the tools that the results of a content refer to."""
    for block in () if isinstance(content, str) else content:
        if isinstance(block, ToolReferenceBlock):
            yield block.tool_name
        elif isinstance(block, ToolResultBlock) and block.content:
            yield from references(block.content)

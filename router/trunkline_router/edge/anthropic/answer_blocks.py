"""The content blocks of an answer: as a whole, and as events of a stream."""

from collections.abc import Iterable
from typing import Any

import orjson

from trunkline.answer.answer_items import REASONING, TEXT, TOOL_CALL, AnswerItem
from trunkline.v1.inference_pb2 import AnswerPart
from trunkline_router.edge.http.sse import event

Json = dict[str, Any]

# Clients send it back with the thinking that it came with, and some leave out thinking without one. It proves nothing.
SIGNATURE = "unsigned"
# Heads of events are not serialized each time.
_HEAD = b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":{"type":"%b","%b":'
_TAIL = b"}}\n\n"


def text_block(text: str) -> Json:
    return {"type": "text", "text": text, "citations": []}


def content_of(items: Iterable[AnswerItem], *, shows_thinking: bool) -> list[Json]:
    """Returns the blocks of a whole answer. A call that was cut off is left out: its arguments may be no object."""
    return [_block(item, shows_thinking) for item in items if item.kind != TOOL_CALL or item.is_complete]


def _block(item: AnswerItem, shows_thinking: bool) -> Json:
    if item.kind == TEXT:
        return text_block(item.text)
    if item.kind == REASONING:
        return {"type": "thinking", "thinking": item.text if shows_thinking else "", "signature": SIGNATURE}
    # The arguments are JSON as they are.
    return {"type": "tool_use", "id": item.call_id, "name": item.name, "input": orjson.Fragment(item.text)}


class BlockEvents:
    """Writes the events of an answer's blocks, one after the other. A block begins with its first part."""

    def __init__(self, *, shows_thinking: bool) -> None:
        self._shows_thinking = shows_thinking
        self._index = -1  # of the last block
        self._open = ""  # its kind, if it has not ended

    def part(self, part: AnswerPart) -> bytes:
        """Returns the events for the next part."""
        kind = part.WhichOneof("part")
        if kind == "text":
            return self.text(part.text)
        if kind == "reasoning":
            began = self._within(REASONING, {"type": "thinking", "thinking": "", "signature": ""})
            shown = self._delta(b"thinking_delta", b"thinking", part.reasoning) if self._shows_thinking else b""
            return began + shown
        if kind == "arguments":
            return self._delta(b"input_json_delta", b"partial_json", part.arguments)
        if kind == "tool_call_end":
            return self._end()
        call = part.tool_call
        began = self._begin(TOOL_CALL, {"type": "tool_use", "id": call.id, "name": call.name, "input": {}})
        return began + self._delta(b"input_json_delta", b"partial_json", call.arguments)

    def text(self, text: str) -> bytes:
        """Returns the events for more text."""
        return self.begin_text() + self._delta(b"text_delta", b"text", text)

    def begin_text(self) -> bytes:
        """Returns the event that begins a block of text, unless one is open."""
        return self._within(TEXT, text_block(""))

    def end(self) -> bytes:
        """Returns the last events. An empty answer has an empty block, because clients read the first one."""
        return (self.begin_text() if self._index < 0 else b"") + self._end()

    def _within(self, kind: str, block: Json) -> bytes:
        return b"" if self._open == kind else self._begin(kind, block)

    def _begin(self, kind: str, block: Json) -> bytes:
        ended = self._end()
        self._index, self._open = self._index + 1, kind
        return ended + named_event("content_block_start", index=self._index, content_block=block)

    def _delta(self, kind: bytes, name: bytes, text: str) -> bytes:
        return b"".join((_HEAD % (self._index, kind, name), orjson.dumps(text), _TAIL))

    def _end(self) -> bytes:
        if not self._open:
            return b""
        signed = self._delta(b"signature_delta", b"signature", SIGNATURE) if self._open == REASONING else b""
        self._open = ""
        return signed + named_event("content_block_stop", index=self._index)


def named_event(kind: str, **fields: Any) -> bytes:
    return event(orjson.dumps({"type": kind, **fields}), kind.encode())

"""Text, reasoning and calls of tools as chat completions write them: in a message, or in the deltas of a stream."""

from collections.abc import Sequence

from trunkline.answer.answer_items import REASONING, TOOL_CALL, AnswerItem, JoinedText
from trunkline.v1.inference_pb2 import AnswerPart
from trunkline_router.edge.openai.openai_answer import Json


def message_of(text: str, items: Sequence[AnswerItem], reasoning: str) -> Json:
    """Returns a choice's message. A call that was cut off has the arguments so far.

    text: what a reader sees
    items: that the answer consists of; none if it is plain text
    reasoning: the name of the field that has it; "": it is left out
    """
    message: Json = {"role": "assistant", "content": text, "refusal": None, "annotations": []}
    if calls := [_call(item.call_id, item.name, item.text) for item in items if item.kind == TOOL_CALL]:
        message |= {"content": text or None, "tool_calls": calls}
    if reasoning and (thought := "".join(item.text for item in items if item.kind == REASONING)):
        message[reasoning] = thought
    return message


def _call(call_id: str, name: str, arguments: str) -> Json:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


class Deltas:
    """The deltas of one choice of a stream.

    reasoning: as for message_of()
    """

    __slots__ = ("_num_calls", "_num_complete", "_reasoning", "text")

    def __init__(self, reasoning: str) -> None:
        self._reasoning = reasoning
        self.text = JoinedText()
        self._num_calls = self._num_complete = 0

    @property
    def calls_tools(self) -> bool:
        """As calls_tools() of the whole choice."""
        return 0 < self._num_calls == self._num_complete

    def of(self, part: AnswerPart) -> Json:
        """Returns the delta for the next part; empty if it has nothing to tell."""
        if text := self.text.of(part.text):
            return {"content": text}
        kind = part.WhichOneof("part")
        if kind == "reasoning":
            return {self._reasoning: part.reasoning} if self._reasoning else {}
        if kind == "tool_call":
            self._num_calls += 1
            call = part.tool_call
            return self._of_call(_call(call.id, call.name, call.arguments))
        if kind == "arguments":
            return self._of_call({"function": {"arguments": part.arguments}})
        self._num_complete += 1
        return {}

    def _of_call(self, delta: Json) -> Json:
        return {"tool_calls": [{"index": self._num_calls - 1, **delta}]}

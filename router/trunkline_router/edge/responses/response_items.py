"""The output of a response: its items as JSON, and what the responses of the shared path add to them."""

import secrets
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import orjson

from trunkline.answer.answer_items import REASONING, TEXT, TOOL_CALL, AnswerItem, AnswerItems
from trunkline.v1.generation_pb2 import FinishReason, TokenLogprobs
from trunkline.v1.inference_pb2 import ChatMessage, GenerateResponse, Usage
from trunkline_router.edge.chat_messages import Piece, call_part, chat_message, reasoning_part
from trunkline_router.edge.openai.openai_answer import Json
from trunkline_router.edge.responses.input_items import INCOMPLETE
from trunkline_router.edge.tool_fields import custom_input

ID_BYTES = 24  # random ones: ids cannot be guessed
RESPONSE = "resp"  # what the id of a response begins with
IN_PROGRESS, COMPLETED = "in_progress", "completed"  # statuses, beside INCOMPLETE
CUSTOM_CALL = "custom_tool_call"  # the kind of a call whose tool takes a text, beside those of AnswerItem
# By the kind of an item: what its id begins with, and what the events of its text are called.
PREFIXES = {TEXT: "msg", REASONING: "rs", TOOL_CALL: "fc", CUSTOM_CALL: "ctc"}
EVENTS = {
    TEXT: "output_text",
    REASONING: "reasoning_text",
    TOOL_CALL: "function_call_arguments",
    CUSTOM_CALL: f"{CUSTOM_CALL}_input",
}

Event = tuple[str, Json]  # its name, and its fields without its number
News = tuple["OutputItem", str, list[Json]]  # an item, and the text and log-probabilities that were added to it


def new_response_id() -> str:
    return f"{RESPONSE}_{secrets.token_hex(ID_BYTES)}"


def response_of(item_id: str) -> str:
    """Returns the id of the response that an item belongs to, if it is one of ours."""
    return f"{RESPONSE}_{item_id.partition('_')[2][: 2 * ID_BYTES]}"


class OutputItem:
    """Reasoning, a message or a call, with the events that tell it.

    Its deltas have a head that is made once: serializing all of it takes longer. The input of a custom tool is told
    when the call ends.

    kind: of the answer, or CUSTOM_CALL
    """

    def __init__(self, answer: AnswerItem, response_id: str, index: int, kind: str) -> None:
        self.answer = answer
        self.kind = kind
        self.logprobs: list[Json] = []
        self._id = f"{PREFIXES[kind]}_{response_id.removeprefix(RESPONSE + '_')}{index:04x}"
        self._index = index
        self._event = f"response.{EVENTS[kind]}"
        self._place: Json = {"item_id": self._id, "output_index": index}
        if self.has_parts:
            self._place["content_index"] = 0
        name = f"{self._event}.delta"
        head = orjson.dumps({"type": name, **self._place}).removesuffix(b"}")
        self._delta_head = b"event: %b\ndata: %b," % (name.encode(), head)

    @property
    def has_parts(self) -> bool:
        return self.kind in (TEXT, REASONING)

    def json(self, status: str) -> Json:
        """The item so far."""
        return self._json(status, self.answer.text, [self._part(self.answer.text, self.logprobs)])

    def opening(self) -> Iterator[Event]:
        """The events before its text."""
        item = self._json(IN_PROGRESS, "", [])
        yield "response.output_item.added", {"output_index": self._index, "item": item}
        if self.has_parts:
            yield "response.content_part.added", {**self._place, "part": self._part("", [])}

    def delta(self, number: int, text: str, logprobs: list[Json]) -> bytes:
        """The event for more of its text; empty for a call of a custom tool."""
        if self.kind == CUSTOM_CALL:
            return b""
        data: Json = {"sequence_number": number, "delta": text}
        if self.kind == TEXT:
            data["logprobs"] = logprobs
        return b"%b%b\n\n" % (self._delta_head, orjson.dumps(data).removeprefix(b"{"))

    def closing(self, status: str) -> Iterator[Event]:
        """The events after its text."""
        item = self.json(status)
        if self.kind == TOOL_CALL:
            yield f"{self._event}.done", {**self._place, "name": item["name"], "arguments": item["arguments"]}
        elif self.kind == CUSTOM_CALL:
            yield f"{self._event}.delta", {**self._place, "delta": item["input"]}
            yield f"{self._event}.done", {**self._place, "input": item["input"]}
        else:
            [part] = item["content"]
            beside = {"logprobs": self.logprobs} if self.kind == TEXT else {}
            yield f"{self._event}.done", {**self._place, "text": part["text"], **beside}
            yield "response.content_part.done", {**self._place, "part": part}
        yield "response.output_item.done", {"output_index": self._index, "item": item}

    def piece(self) -> Piece:
        """The item as a part of a turn."""
        answer = self.answer
        if self.kind == TEXT:
            return answer.text
        if self.kind == REASONING:
            return reasoning_part(answer.text)
        return call_part(answer.call_id, answer.name, answer.text)

    def _json(self, status: str, text: str, content: list[Json]) -> Json:
        answer = self.answer
        if self.kind == TEXT:
            fields: Json = {"type": "message", "status": status, "role": "assistant", "content": content}
        elif self.kind == REASONING:
            fields = {"type": "reasoning", "status": status, "summary": [], "content": content}
        else:
            fields = {"type": "function_call", "status": status, "call_id": answer.call_id, "name": answer.name}
            if self.kind == CUSTOM_CALL:
                fields |= {"type": CUSTOM_CALL, "input": custom_input(text)}
            else:
                fields["arguments"] = text
        return {"id": self._id, **fields}

    def _part(self, text: str, logprobs: list[Json]) -> Json:
        beside: Json = {"annotations": [], "logprobs": logprobs} if self.kind == TEXT else {}
        return {"type": EVENTS[self.kind], "text": text, **beside}


class Output:
    """The items of a response so far, in order, and what else the responses of the shared path add up to.

    Log-probabilities belong to tokens, and items do not tell theirs. So only a message that is the whole output has
    them.

    logprobs: names the log-probabilities of tokens, if the request wants them
    custom: names of the tools that take a text
    """

    def __init__(
        self,
        response_id: str,
        logprobs: Callable[[Sequence[TokenLogprobs]], list[Json]],
        custom: frozenset[str] = frozenset(),
    ) -> None:
        self.items: list[OutputItem] = []
        self.usage = Usage()
        self._response_id = response_id
        self._logprobs = logprobs
        self._custom = custom
        self._new_logprobs: list[Json] = []
        self._answer = AnswerItems()
        self._is_text = True
        self._finish_reason: Any = FinishReason.FINISH_REASON_UNSPECIFIED

    @property
    def is_complete(self) -> bool:
        return bool(self._finish_reason == FinishReason.FINISH_REASON_STOP)

    def take(self, response: GenerateResponse) -> Iterator[News]:
        """Takes the next response. Yields what it adds. An item ends where another one begins, and a call when it is
        complete."""
        if response.HasField("usage"):
            self.usage = response.usage
        for chunk in response.chunks:  # of one choice
            self._finish_reason = chunk.finish_reason or self._finish_reason
            if self._is_text:
                self._new_logprobs += self._logprobs(chunk.logprobs)
            if chunk.text:
                yield self._add_text(chunk.text)
        for part in response.parts:
            if self._answer.take(part):
                self._begin(self._answer.items[-1])
            text = part.text or part.reasoning or part.arguments or part.tool_call.arguments
            yield self._news(text)
        if self._new_logprobs and self.items:  # of tokens without a text of their own
            yield self._news("")

    def end(self) -> Iterator[News]:
        """Takes the end. Yields an empty message if there was no output."""
        if not self.items:
            yield self._add_text("")

    def status(self, item: OutputItem) -> str:
        """Returns how an item has ended."""
        if item.answer.kind == TOOL_CALL:
            return COMPLETED if item.answer.is_complete else INCOMPLETE
        return COMPLETED if self.is_complete or item is not self.items[-1] else INCOMPLETE

    def json(self) -> list[Json]:
        """Returns the items."""
        return [item.json(self.status(item)) for item in self.items]

    def turn(self) -> list[ChatMessage]:
        """Returns the output as a turn of the conversation. Calls that were cut off are left out: no template could
        write their arguments. If nothing else is left, there is no turn."""
        kept = [item.piece() for item in self.items if item.answer.kind != TOOL_CALL or item.answer.is_complete]
        return [chat_message("assistant", kept)] if kept else []

    def cut_off(self) -> frozenset[str]:
        """Returns the ids of the calls that turn() leaves out."""
        answers = [item.answer for item in self.items if item.answer.kind == TOOL_CALL]
        return frozenset(answer.call_id for answer in answers if not answer.is_complete)

    def _add_text(self, text: str) -> News:
        if self._answer.add_text(text):
            self._begin(self._answer.items[-1])
        return self._news(text)

    def _news(self, text: str) -> News:
        """What was added to the last item."""
        logprobs, self._new_logprobs = self._new_logprobs, []
        self.items[-1].logprobs += logprobs
        return self.items[-1], text, logprobs

    def _begin(self, answer: AnswerItem) -> None:
        kind = CUSTOM_CALL if answer.kind == TOOL_CALL and answer.name in self._custom else answer.kind
        self.items.append(OutputItem(answer, self._response_id, len(self.items), kind))
        if answer.kind != TEXT:
            self._is_text, self._new_logprobs, self.items[0].logprobs = False, [], []

"""What a client returns: pieces of output as they arrive, and whole answers."""

from collections import defaultdict
from dataclasses import dataclass, field

from trunkline.answer.answer_items import AnswerItems, JoinedText
from trunkline.names import finish_name
from trunkline.v1.generation_pb2 import OutputChunk, TokenLogprobs, ToolCall
from trunkline.v1.inference_pb2 import AnswerPart, ChatMessage, ChatPart, GenerateResponse, PromptInfo, Usage


@dataclass(frozen=True, slots=True)
class Piece:
    """New output of one choice.

    text: without reasoning, calls and their marks, if the answer is parsed (PromptInfo.answer_format). A line break
        takes the place of what stood between two runs of text
    parts: typed, as they come; empty if the answer is plain text
    tool_calls: those that are complete with this piece
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    finish_reason: str | None  # "stop", "length" or "abort" on the choice's last piece
    response: GenerateResponse  # the response that carried it: prompt, usage, request id
    parts: list[AnswerPart] = field(default_factory=list)
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)


@dataclass(slots=True)
class Choice:
    """A choice's whole output.

    text: without reasoning, calls and their marks, if the answer is parsed; a line break takes the place of what
        stood between two runs of text
    tool_calls: the complete ones. One that was cut off is left out, because its arguments may be no JSON
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)

    @property
    def message(self) -> ChatMessage:
        """The choice as a turn of the conversation, for the next request."""
        parts = [ChatPart(reasoning=self.reasoning)] if self.reasoning else []
        parts += [ChatPart(text=self.text)] if self.text else []
        return ChatMessage(role="assistant", parts=[*parts, *(ChatPart(tool_call=call) for call in self.tool_calls)])


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer."""

    request_id: str
    choices: list[Choice]
    prompt: PromptInfo
    usage: Usage

    @property
    def text(self) -> str:
        """The first choice's text."""
        return self.choices[0].text

    @property
    def reasoning(self) -> str:
        """The first choice's reasoning."""
        return self.choices[0].reasoning

    @property
    def tool_calls(self) -> list[ToolCall]:
        """The first choice's complete calls."""
        return self.choices[0].tool_calls


class Pieces:
    """Makes the pieces of one answer."""

    def __init__(self) -> None:
        self._is_parsed = False
        self._items = defaultdict[int, AnswerItems](AnswerItems)
        self._texts = defaultdict[int, JoinedText](JoinedText)

    def of(self, response: GenerateResponse) -> list[Piece]:
        """The pieces of the next response."""
        if response.HasField("prompt"):
            self._is_parsed = bool(response.prompt.answer_format)
        return [self._piece(chunk, response) for chunk in response.chunks]

    def _piece(self, chunk: OutputChunk, response: GenerateResponse) -> Piece:
        index = chunk.index
        parts = [part for part in response.parts if part.index == index] if self._is_parsed else []
        return Piece(
            index,
            "".join([self._texts[index].of(part.text) for part in parts]) if self._is_parsed else chunk.text,
            list(chunk.token_ids),
            list(chunk.logprobs),
            finish_name(chunk.finish_reason) if chunk.finish_reason else None,
            response,
            parts,
            "".join([part.reasoning for part in parts]),
            self._complete_calls(index, parts) if parts else [],
        )

    def _complete_calls(self, index: int, parts: list[AnswerPart]) -> list[ToolCall]:
        answer, complete = self._items[index], []
        for part in parts:
            answer.take(part)
            if part.HasField("tool_call_end"):
                call = answer.items[-1]
                complete.append(ToolCall(id=call.call_id, name=call.name, arguments=call.text))
        return complete


class Collector:
    """Joins the pieces of an answer."""

    def __init__(self) -> None:
        self._choices: dict[int, Choice] = {}
        self._request_id, self._prompt, self._usage = "", PromptInfo(), Usage()

    def add(self, piece: Piece) -> None:
        choice = self._choices.setdefault(piece.index, Choice())
        choice.text += piece.text
        choice.reasoning += piece.reasoning
        choice.tool_calls += piece.tool_calls
        choice.token_ids += piece.token_ids
        choice.logprobs += piece.logprobs
        choice.finish_reason = piece.finish_reason or choice.finish_reason
        self._request_id = piece.response.request_id
        if piece.response.HasField("prompt"):
            self._prompt = piece.response.prompt
        if piece.response.HasField("usage"):
            self._usage = piece.response.usage

    def completion(self) -> Completion:
        """The answer, when all of its pieces were added."""
        choices = [self._choices[index] for index in sorted(self._choices)]
        return Completion(self._request_id, choices, self._prompt, self._usage)

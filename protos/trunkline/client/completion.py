"""What a client returns: pieces of output as they arrive, and whole answers."""

from dataclasses import dataclass, field

from trunkline.names import finish_name
from trunkline.v1.generation_pb2 import OutputChunk, TokenLogprobs
from trunkline.v1.inference_pb2 import AnswerPart, GenerateResponse, PromptInfo, Usage


@dataclass(frozen=True, slots=True)
class Piece:
    """New output of one choice."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    finish_reason: str | None  # "stop", "length" or "abort" on the choice's last piece
    response: GenerateResponse  # the response that carried it: prompt, usage, request id
    parts: list[AnswerPart]  # typed; empty if the answer is text


@dataclass(slots=True)
class Choice:
    """A choice's whole output."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None


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


def piece_of(chunk: OutputChunk, response: GenerateResponse) -> Piece:
    """The piece for a chunk of a response."""
    return Piece(
        chunk.index,
        chunk.text,
        list(chunk.token_ids),
        list(chunk.logprobs),
        finish_name(chunk.finish_reason) if chunk.finish_reason else None,
        response,
        [part for part in parts if part.index == chunk.index] if (parts := response.parts) else [],
    )


class Collector:
    """Joins the pieces of an answer."""

    def __init__(self) -> None:
        self._choices: dict[int, Choice] = {}
        self._request_id, self._prompt, self._usage = "", PromptInfo(), Usage()

    def add(self, piece: Piece) -> None:
        choice = self._choices.setdefault(piece.index, Choice())
        choice.text += piece.text
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

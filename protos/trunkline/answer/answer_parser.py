"""The parts of an answer: text, reasoning and tool calls, found in the output of its choices. Pure.

Routers parse what they hand to clients, and direct clients what they get from workers, both behind the ledger. So a
parser sees the output of its choice once and in order, whichever workers it comes from. Ledgers, claims, quotas and
usage count the output as it was generated.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

from trunkline.answer.gemma import Gemma
from trunkline.answer.harmony import Harmony
from trunkline.answer.json_calls import DeepSeekV3, Granite, Hermes, KimiK2, Llama3Json, Mistral
from trunkline.answer.output_reader import NO_CONTEXT, SPACE, AnswerContext
from trunkline.answer.pythonic import Pythonic
from trunkline.answer.xml_calls import DeepSeekDsml, Glm, KimiK3, QwenXml
from trunkline.v1.generation_pb2 import FinishReason, OutputChunk
from trunkline.v1.inference_pb2 import AnswerPart, GenerateResponse


class AnswerParser(Protocol):
    """Finds the parts in the output of one choice.

    The parts do not depend on how the output was cut, if neighbours of one kind are joined. A parser holds back only
    what may turn out to be something else, and of that a bounded length. It never raises: output that does not parse
    is text.

    not_plain: output without any of these characters is text, as most output is, unless white space is at its end.
        feed() need not take it, nor finish() the end if it is the last one. None: feed() must take the next output
    """

    not_plain: str | None

    def __init__(self, context: AnswerContext) -> None: ...

    @classmethod
    def marks(cls) -> Sequence[str]:
        """What the parser finds parts by. If a special token occurs in one of these, it is a mark, whose text the
        parser needs."""
        ...

    def feed(self, text: str) -> list[AnswerPart]:
        """Takes the next output, as in an OutputChunk: text can lag behind the tokens. Returns the new parts, without
        their index."""
        ...

    def finish(self, reason: "FinishReason.ValueType") -> list[AnswerPart]:
        """Takes the end of the output. Returns what was held back."""
        ...


CALL_PARTS = ("tool_call", "arguments", "tool_call_end")

# The parsers of answer formats, by their names (GetModelResponse.answer_format). Plain text has none.
PARSERS: dict[str, type[AnswerParser]] = {
    "deepseek_dsml": DeepSeekDsml,
    "deepseek_v3": DeepSeekV3,
    "gemma4": Gemma,
    "glm": Glm,
    "granite": Granite,
    "harmony": Harmony,
    "hermes": Hermes,
    "kimi_k2": KimiK2,
    "kimi_k3": KimiK3,
    "llama3_json": Llama3Json,
    "mistral": Mistral,
    "pythonic": Pythonic,
    "qwen_xml": QwenXml,
}


def reasoning_marks(answer_format: str) -> dict[str, str]:
    """Returns the marks around reasoning that a prompt can have: what begins it, and what ends it."""
    return dict(getattr(PARSERS[answer_format], "thinks", ()))


def call_marks(answer_format: str) -> Sequence[str]:
    """Returns the marks that begin calls."""
    marks: Sequence[str] = getattr(PARSERS[answer_format], "calls", ())
    return marks


class AnswerParsers:
    """The parsers of a request's choices.

    tool_calls, complete_tool_calls: how many the choices have so far
    reasoning: so far, by choice
    """

    __slots__ = (
        "_context", "_not_plain", "_num_calls", "_parsers", "_text_stays", "complete_tool_calls", "reasoning",
        "tool_calls",
    )  # fmt: skip

    def __init__(self, answer_format: str, choices: int, context: AnswerContext = NO_CONTEXT) -> None:
        self._parsers = [PARSERS[answer_format](context) for _ in range(choices)]
        self._context = context
        # Of the parsers and the context. Other streams push what a stream touches out of the caches between two tokens.
        self._not_plain = [parser.not_plain for parser in self._parsers]
        self._text_stays = context.text_stays
        self._num_calls = [0] * choices  # that have begun, if there may be one
        self.tool_calls = self.complete_tool_calls = 0
        self.reasoning: list[list[str]] = [[] for _ in range(choices)]

    def parse(self, chunks: Mapping[int, OutputChunk], response: GenerateResponse) -> None:
        """Adds the parts of a response's chunks, each of which continues its choice. As AnswerContext says, some text
        stays in its chunk alone.

        chunks: by choice
        """
        text_stays = self._text_stays
        for index, chunk in chunks.items():
            text, not_plain = chunk.text, self._not_plain[index]
            is_plain = not_plain is not None and text != "" and text[-1] not in SPACE
            for character in not_plain or "":  # a pattern takes three times as long
                is_plain = is_plain and character not in text
            if not is_plain:
                if text_stays:
                    chunk.ClearField("text")
                response.parts.extend(self._parts(index, text, chunk.finish_reason))
            elif not text_stays:
                response.parts.add(index=index, text=text)

    def _parts(self, index: int, text: str, reason: "FinishReason.ValueType") -> list[AnswerPart]:
        """Returns the parts that a choice's next output completes."""
        parser = self._parsers[index]
        parts = parser.feed(text)
        if reason:
            parts += parser.finish(reason)
        self._not_plain[index] = parser.not_plain
        if self._context.single_tool_call:
            parts = [part for part in parts if not self._is_of_later_call(index, part)]
        for part in parts:
            part.index = index
            self._count(part)
        return parts

    def _count(self, part: AnswerPart) -> None:
        match part.WhichOneof("part"):
            case "reasoning":
                self.reasoning[part.index].append(part.reasoning)
            case "tool_call":
                self.tool_calls += 1
            case "tool_call_end":
                self.complete_tool_calls += 1

    def _is_of_later_call(self, index: int, part: AnswerPart) -> bool:
        kind = part.WhichOneof("part")
        self._num_calls[index] += kind == "tool_call"
        return kind in CALL_PARTS and self._num_calls[index] > 1


def parsers_of(answer_format: str, choices: int, context: AnswerContext = NO_CONTEXT) -> AnswerParsers | None:
    """Returns the parsers of a request's choices; None for plain text. Raises KeyError for a format that is not
    known."""
    return AnswerParsers(answer_format, choices, context) if answer_format else None

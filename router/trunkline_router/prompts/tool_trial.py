"""Finds out how a chat template takes tools: it renders a short conversation with two calls until nothing is lost.

Templates were written against different callers. Some take arguments only as text, some raise an exception for the ids
that other models' calls have, and some leave out roles that they do not know.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

from trunkline.status import RequestRefused
from trunkline.v1.generation_pb2 import ToolCall
from trunkline.v1.inference_pb2 import ChatMessage, ChatMessages, ChatPart, Tool, ToolResult
from trunkline_router.prompts.conversation import ASSISTANT, PLAIN, TOOL, ToolStyle

# Plain words: templates may trim what they write, or write it as JSON.
ARGUMENTS, RESULTS = ("firstargument", "secondargument"), ("firstresult", "secondresult")
STYLES = [ToolStyle(*flags) for flags in sorted(product((False, True), repeat=5), key=sum)]


@dataclass(frozen=True, slots=True)
class ToolPlaces:
    """Whether a template keeps calls of tools and results, if they come in this style."""

    style: ToolStyle = PLAIN
    keeps_calls: bool = True
    keeps_results: bool = True


def _turn(number: int, *beside: ChatPart) -> list[ChatMessage]:
    """A call and its result."""
    call = ToolCall(id=f"call_{number:024}", name="trial", arguments=f'{{"key": "{ARGUMENTS[number]}"}}')
    result = ToolResult(call_id=call.id, content=RESULTS[number])
    return [
        ChatMessage(role=ASSISTANT, parts=[*beside, ChatPart(tool_call=call)]),
        ChatMessage(role=TOOL, parts=[ChatPart(tool_result=result)]),
    ]


TRIAL = ChatMessages(
    messages=[
        ChatMessage(role="user", content="question"),
        *_turn(0),
        *_turn(1, ChatPart(reasoning="thought"), ChatPart(text="text")),
    ],
    tools=[Tool(name="trial")],
)


def tool_places(render: Callable[[ChatMessages, ToolStyle], str]) -> ToolPlaces | None:
    """Returns the style in which a template keeps most; None if it refuses all of them."""
    best: ToolPlaces | None = None
    for style in STYLES:
        try:
            text = render(TRIAL, style)
        except RequestRefused:
            continue
        keeps_calls, keeps_results = (all(word in text for word in words) for words in (ARGUMENTS, RESULTS))
        if best is None or keeps_calls + keeps_results > best.keeps_calls + best.keeps_results:
            best = ToolPlaces(style, keeps_calls, keeps_results)
        if keeps_calls and keeps_results:
            break
    return best

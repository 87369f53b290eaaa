"""Answers that a limit cuts off, anywhere in their thought and their call: streams add up to whole answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.clients.conftest import QUESTION
from tests.clients.edge import ANY_KEY, Edge

if TYPE_CHECKING:
    from collections.abc import Iterator

    from openai import OpenAI

ASKED: list[Any] = [{"role": "user", "content": QUESTION}]
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTION: dict[str, Any] = {"name": "get_weather", "parameters": SCHEMA}
LIMITS = range(1, 60, 4)  # tokens; the whole answer has 57


@pytest.fixture(scope="module")
def client(player: Edge) -> Iterator[OpenAI]:
    from openai import OpenAI

    with OpenAI(base_url=player.url, api_key=ANY_KEY, max_retries=0, timeout=60) as made:
        yield made


def without_ids(shown: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in shown.items() if name not in ("id", "call_id", "parsed", "parsed_arguments")}


def test_chats(client: OpenAI, player: Edge) -> None:
    import openai

    def shown(choice: Any) -> Any:
        calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()]
        extra = choice.message.to_dict().get("reasoning")
        return choice.finish_reason, choice.message.content or "", extra, calls

    options: dict[str, Any] = {"model": player.model, "tools": [{"type": "function", "function": FUNCTION}]}
    given = []
    for limit in LIMITS:
        whole = client.chat.completions.create(messages=ASKED, max_tokens=limit, **options)
        with client.chat.completions.stream(messages=ASKED, max_tokens=limit, **options) as stream:
            try:
                final: Any = stream.get_final_completion()
            except openai.LengthFinishReasonError as cut:  # the helper takes no answer that reached its limit
                final = cut.completion
        given.append(shown(whole.choices[0]))
        assert shown(final.choices[0]) == given[-1]
    calls = [calls for _, _, _, calls in given]
    assert [] in calls
    assert any(one and one[0][1] not in ("", '{"city": "Paris"}') for one in calls), "one is cut in its arguments"
    assert [end for end, *_ in given] == ["length"] * (len(given) - 1) + ["tool_calls"]


def test_responses(client: OpenAI, player: Edge) -> None:
    options: dict[str, Any] = {"model": player.model, "tools": [{"type": "function", "strict": False, **FUNCTION}]}
    for limit in LIMITS:
        whole = client.responses.create(input=QUESTION, max_output_tokens=limit, **options)
        with client.responses.stream(input=QUESTION, max_output_tokens=limit, **options) as stream:
            final = [event for event in stream][-1].response  # type: ignore[union-attr]
        assert final.status == whole.status == ("completed" if limit >= 57 else "incomplete")
        items = [[without_ids(item.to_dict()) for item in one.output] for one in (final, whole)]
        assert items[0] == items[1]


def test_messages(player: Edge) -> None:
    from anthropic import Anthropic

    options: dict[str, Any] = {"model": player.model, "tools": [{"name": "get_weather", "input_schema": SCHEMA}]}
    with Anthropic(base_url=player.root, api_key=ANY_KEY, max_retries=0, timeout=60) as client:
        for limit in LIMITS:
            whole = client.messages.create(messages=ASKED, max_tokens=limit, **options)
            with client.messages.stream(messages=ASKED, max_tokens=limit, **options) as stream:
                final = stream.get_final_message()
            assert final.stop_reason == whole.stop_reason == ("tool_use" if limit >= 57 else "max_tokens")
            # A stream has begun a call before it is cut off. An answer without blocks has an empty text.
            left_out = {"tool_use"} if limit < 57 else set()
            blocks = [
                [
                    without_ids(block.to_dict())
                    for block in one.content
                    if block.type not in left_out and getattr(block, "text", None) != ""
                ]
                for one in (final, whole)
            ]
            assert blocks[0] == blocks[1]

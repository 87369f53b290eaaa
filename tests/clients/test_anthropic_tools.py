"""Anthropic's own Python client: a call, its result, and the answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.clients.conftest import ANSWER, CITY, FIRST_THOUGHT, LAST_THOUGHT, QUESTION, WEATHER
from tests.clients.edge import ANY_KEY, Edge

if TYPE_CHECKING:
    from collections.abc import Iterator

    from anthropic import Anthropic

TOOL: dict[str, Any] = {
    "name": "get_weather",
    "description": "The weather in a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
ASKED: list[Any] = [{"role": "user", "content": QUESTION}]


@pytest.fixture(scope="module")
def client(player: Edge) -> Iterator[Anthropic]:
    from anthropic import Anthropic

    with Anthropic(base_url=player.root, api_key=ANY_KEY, max_retries=0, timeout=60) as made:
        yield made


def test_a_message_calls_a_tool_and_answers_with_its_result(client: Anthropic, player: Edge) -> None:
    options: dict[str, Any] = {"model": player.model, "max_tokens": 500, "tools": [TOOL]}
    called = client.messages.create(messages=ASKED, **options)
    type(called).model_validate(called.to_dict())
    assert called.stop_reason == "tool_use"
    thought, call = called.content
    assert thought.type == "thinking"
    assert thought.thinking == FIRST_THOUGHT
    assert call.type == "tool_use"
    assert (call.name, call.input) == ("get_weather", {"city": CITY})
    result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": WEATHER}
    history: list[Any] = [
        *ASKED,
        {"role": "assistant", "content": called.content},
        {"role": "user", "content": [result]},
    ]
    answer = client.messages.create(messages=history, **options)
    assert [block.type for block in answer.content] == ["thinking", "text"]
    assert answer.content[0].to_dict()["thinking"] == LAST_THOUGHT
    assert answer.content[1].to_dict()["text"] == ANSWER
    assert answer.stop_reason == "end_turn"


def test_the_accumulated_stream_is_the_whole_message(client: Anthropic, player: Edge) -> None:
    options: dict[str, Any] = {"model": player.model, "max_tokens": 500, "tools": [TOOL]}
    whole = client.messages.create(messages=ASKED, **options)
    with client.messages.stream(messages=ASKED, **options) as stream:
        types = {event.type for event in stream}
        final = stream.get_final_message()
    assert {"thinking", "signature", "input_json"} <= types
    assert final.stop_reason == "tool_use"
    assert [block.to_dict() | {"id": ""} for block in final.content] == [
        block.to_dict() | {"id": ""} for block in whole.content
    ]
    assert final.usage.output_tokens == whole.usage.output_tokens


def test_the_tool_runner_runs_to_the_answer(client: Anthropic, player: Edge) -> None:
    from anthropic import beta_tool

    @beta_tool
    def get_weather(city: str) -> str:
        """The weather in a city."""
        return f"{city}: 18 degrees and clear"

    for stream in (False, True):
        runner: Any = client.beta.messages.tool_runner(
            model=player.model, max_tokens=500, tools=[get_weather], messages=ASKED, stream=stream
        )
        assert runner.until_done().content[-1].text == ANSWER

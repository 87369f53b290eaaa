"""OpenAI's own Python client: a call, its result, and the answer, over chat and responses."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from pydantic import BaseModel

from tests.clients.conftest import ANSWER, CITY, FIRST_THOUGHT, LAST_THOUGHT, QUESTION, WEATHER
from tests.clients.edge import ANY_KEY, Edge

if TYPE_CHECKING:
    from collections.abc import Iterator

    from openai import OpenAI

FUNCTION: dict[str, Any] = {
    "name": "get_weather",
    "description": "The weather in a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
ASKED: list[Any] = [{"role": "user", "content": QUESTION}]


@pytest.fixture(scope="module")
def client(player: Edge) -> Iterator[OpenAI]:
    from openai import OpenAI

    with OpenAI(base_url=player.url, api_key=ANY_KEY, max_retries=0, timeout=60) as made:
        yield made


def assert_as_declared(answer: Any) -> None:
    """The client builds its objects without checking them; this checks what the server really sent."""
    type(answer).model_validate(answer.to_dict())


def test_a_chat_calls_a_tool_and_answers_with_its_result(client: OpenAI, player: Edge) -> None:
    options: dict[str, Any] = {"model": player.model, "tools": [{"type": "function", "function": FUNCTION}]}
    called = client.chat.completions.create(messages=ASKED, **options)
    assert_as_declared(called)
    [choice] = called.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    assert choice.message.to_dict()["reasoning"] == FIRST_THOUGHT
    assert choice.message.tool_calls
    [call] = choice.message.tool_calls
    assert call.type == "function"
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"city": CITY}
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": WEATHER}
    for message in (choice.message, choice.message.model_dump()):
        answer = client.chat.completions.create(messages=[*ASKED, message, result], **options)
        assert answer.choices[0].message.content == ANSWER
        assert answer.choices[0].message.to_dict()["reasoning"] == LAST_THOUGHT
        assert answer.choices[0].finish_reason == "stop"


def test_the_accumulated_stream_of_a_chat_is_the_whole_one(client: OpenAI, player: Edge) -> None:
    options: dict[str, Any] = {"model": player.model, "tools": [{"type": "function", "function": FUNCTION}]}
    whole = client.chat.completions.create(messages=ASKED, n=2, **options)
    chunks = list(client.chat.completions.create(messages=ASKED, n=2, stream=True, **options))
    for chunk in chunks:
        assert_as_declared(chunk)
    with client.chat.completions.stream(messages=ASKED, n=2, **options) as stream:
        names = {event.name for event in stream if event.type == "tool_calls.function.arguments.delta"}
        final = stream.get_final_completion()
    assert names == {"get_weather"}, "arguments are streamed"
    for streamed, given in zip(final.choices, whole.choices, strict=True):
        assert streamed.finish_reason == given.finish_reason == "tool_calls"
        assert streamed.message.tool_calls
        assert given.message.tool_calls
        assert [call.function.name for call in streamed.message.tool_calls] == ["get_weather"]
        assert [call.function.arguments for call in streamed.message.tool_calls] == [
            call.function.arguments for call in given.message.tool_calls
        ]
        assert streamed.message.to_dict()["reasoning"] == given.message.to_dict()["reasoning"] == FIRST_THOUGHT


def test_a_response_calls_a_tool_and_answers_with_its_result(client: OpenAI, player: Edge) -> None:
    options: dict[str, Any] = {"model": player.model, "tools": [{"type": "function", "strict": False, **FUNCTION}]}
    called = client.responses.create(input=QUESTION, **options)
    assert_as_declared(called)
    assert called.status == "completed"
    thought, call = called.output
    assert thought.type == "reasoning"
    assert thought.content
    assert thought.content[0].text == FIRST_THOUGHT
    assert call.type == "function_call"
    assert call.name == "get_weather"
    assert json.loads(call.arguments) == {"city": CITY}
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": WEATHER}
    history: list[Any] = [*ASKED, *called.output, result]
    assert client.responses.create(input=history, **options).output_text == ANSWER
    stored = client.responses.create(input=[result], previous_response_id=called.id, **options)
    assert stored.output_text == ANSWER
    assert [item.type for item in stored.output] == ["reasoning", "message"]


def test_the_accumulated_stream_of_a_response_is_the_whole_one(client: OpenAI, player: Edge) -> None:
    options: dict[str, Any] = {"model": player.model, "tools": [{"type": "function", "strict": False, **FUNCTION}]}
    whole = client.responses.create(input=QUESTION, **options)
    events = list(client.responses.create(input=QUESTION, stream=True, **options))
    for event in events:
        assert_as_declared(event)
    types = [event.type for event in events]
    assert types.index("response.reasoning_text.delta") < types.index("response.function_call_arguments.delta")
    with client.responses.stream(input=QUESTION, **options) as stream:
        for _ in stream:
            pass
        final = stream.get_final_response()

    assert [item.type for item in final.output] == ["reasoning", "function_call"]
    assert final.output[0].to_dict()["content"] == whole.output[0].to_dict()["content"]
    assert final.output[1].to_dict()["arguments"] == whole.output[1].to_dict()["arguments"]


class Weather(BaseModel):
    """The arguments of get_weather."""

    city: str


def test_parsed_answers_are_sent_back(client: OpenAI, player: Edge) -> None:
    """The client adds parsed_arguments to the calls that it gives to the program."""
    from openai import pydantic_function_tool

    tool: Any = pydantic_function_tool(Weather, name="get_weather")
    [choice] = client.chat.completions.parse(model=player.model, messages=ASKED, tools=[tool]).choices
    assert choice.message.tool_calls
    [call] = choice.message.tool_calls
    assert call.function.parsed_arguments == Weather(city=CITY)
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": WEATHER}
    for message in (choice.message, choice.message.model_dump()):
        history: list[Any] = [*ASKED, message, result]
        chat = client.chat.completions.create(model=player.model, messages=history, tools=[tool])
        assert chat.choices[0].message.content == ANSWER

    function: Any = {"type": "function", **tool["function"]}
    output = client.responses.parse(model=player.model, input=QUESTION, tools=[function]).output
    assert output[1].type == "function_call"
    returned: Any = {"type": "function_call_output", "call_id": output[1].call_id, "output": WEATHER}
    for items in (output, [item.model_dump() for item in output]):
        history = [*ASKED, *items, returned]
        response = client.responses.create(model=player.model, input=history, tools=[function])
        assert response.output_text == ANSWER

"""langchain-openai against chat, completions and responses."""

from typing import TYPE_CHECKING, Any

import pytest
from pydantic import SecretStr

from tests.clients.conftest import ANSWER, CITY, QUESTION
from tests.clients.edge import ANY_KEY, Edge

if TYPE_CHECKING:  # imported by the tests that use it: collecting tests must not take seconds
    from langchain_openai import ChatOpenAI

pytestmark = pytest.mark.slow  # the import takes seconds

MAX_TOKENS = 12  # fewer than the answer has
HISTORY = [
    ("system", "Be kind."),
    ("user", "Tell me a story about a fox."),
    ("assistant", "Once upon a time there was a fox."),
    ("user", "Go on."),
]


@pytest.fixture
def chat(edge: Edge) -> "ChatOpenAI":
    from langchain_openai import ChatOpenAI

    options: dict[str, Any] = {"temperature": 0, "max_tokens": MAX_TOKENS, "max_retries": 0, "stream_usage": True}
    return ChatOpenAI(model=edge.model, base_url=edge.url, api_key=SecretStr(ANY_KEY), **options)


async def test_invoked_streamed_batched_and_asynchronous_chats_are_equal(chat: "ChatOpenAI") -> None:
    answer = chat.invoke(HISTORY)
    assert isinstance(answer.content, str)
    assert answer.content
    assert answer.response_metadata["finish_reason"] == "length"
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["output_tokens"] == MAX_TOKENS
    chunks = list(chat.stream(HISTORY))
    assert "".join(str(chunk.content) for chunk in chunks) == answer.content
    assert sum(chunk.usage_metadata["output_tokens"] for chunk in chunks if chunk.usage_metadata) == MAX_TOKENS
    assert (await chat.ainvoke(HISTORY)).content == answer.content
    assert "".join([str(chunk.content) async for chunk in chat.astream(HISTORY)]) == answer.content
    assert [one.content for one in chat.batch([HISTORY, HISTORY])] == [answer.content] * 2


def test_the_responses_api_gives_the_same_answer(edge: Edge, chat: "ChatOpenAI") -> None:
    from langchain_openai import ChatOpenAI

    options: dict[str, Any] = {"temperature": 0, "max_tokens": MAX_TOKENS, "max_retries": 0, "use_responses_api": True}
    by_responses = ChatOpenAI(model=edge.model, base_url=edge.url, api_key=SecretStr(ANY_KEY), **options)
    text = chat.invoke(HISTORY).content
    assert by_responses.invoke(HISTORY).text == text
    assert "".join(chunk.text for chunk in by_responses.stream(HISTORY)) == text


def test_many_prompts_in_one_request_are_told_apart(edge: Edge) -> None:
    from langchain_openai import OpenAI

    complete = OpenAI(
        model=edge.model,
        base_url=edge.url,
        api_key=SecretStr(ANY_KEY),
        temperature=0,
        max_tokens=MAX_TOKENS,
        max_retries=0,
    )
    prompts: list[Any] = [f"Once upon a time there was a {animal}" for animal in ("fox", "hen", "frog", "bear", "owl")]
    assert complete.batch(prompts) == [complete.invoke(prompt) for prompt in prompts]
    assert "".join(complete.stream(prompts[0])) == complete.invoke(prompts[0])


async def test_a_bound_tool_is_called_and_its_result_answered(player: Edge) -> None:
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

    @tool
    def get_weather(city: str) -> str:
        """The weather in a city."""
        return f"{city}: 18 degrees and clear"

    for use_responses_api in (False, True):
        options: dict[str, Any] = {"max_retries": 0, "use_responses_api": use_responses_api}
        plain = ChatOpenAI(model=player.model, base_url=player.url, api_key=SecretStr(ANY_KEY), **options)
        chat = plain.bind_tools([get_weather])
        called = chat.invoke([HumanMessage(QUESTION)])
        chunks = list(chat.stream([HumanMessage(QUESTION)]))
        streamed = sum(chunks[1:], chunks[0])
        for message in (called, streamed):
            [call] = message.tool_calls
            assert (call["name"], call["args"]) == ("get_weather", {"city": CITY})
            result: ToolMessage = await get_weather.ainvoke(call)
            history = [HumanMessage(QUESTION), message, result]
            assert chat.invoke(history).text == ANSWER
            assert "".join([chunk.text async for chunk in chat.astream(history)]) == ANSWER

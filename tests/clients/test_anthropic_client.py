"""Anthropic's own Python client, as it comes, against /v1/messages."""

from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio

from tests.clients.edge import ANY_KEY, Edge
from trunkline import Client

if TYPE_CHECKING:  # imported by the tests that use it: collecting tests must not take seconds
    from anthropic import Anthropic, AsyncAnthropic
    from anthropic.types import Message, MessageParam

QUESTION: list["MessageParam"] = [{"role": "user", "content": "Tell me a story about a fox."}]
GREEDY: dict[str, Any] = {"max_tokens": 24, "extra_body": {"temperature": 0.0}}


@pytest.fixture(scope="module")
def client(edge: Edge) -> Iterator["Anthropic"]:
    from anthropic import Anthropic

    with Anthropic(base_url=edge.root, api_key=ANY_KEY, max_retries=0, timeout=60) as made:
        yield made


@pytest_asyncio.fixture
async def async_client(edge: Edge) -> AsyncIterator["AsyncAnthropic"]:
    from anthropic import AsyncAnthropic

    async with AsyncAnthropic(base_url=edge.root, api_key=ANY_KEY, max_retries=0, timeout=60) as made:
        yield made


def assert_as_declared(answer: Any) -> None:
    """The client builds its objects without checking them; this checks what the server really sent."""
    type(answer).model_validate(answer.to_dict())


def text_of(message: "Message") -> str:
    [block] = message.content
    assert block.type == "text"
    return block.text


async def test_a_message_is_the_text_that_grpc_gives(
    client: "Anthropic", async_client: "AsyncAnthropic", edge: Edge
) -> None:
    message = client.messages.create(model=edge.model, messages=QUESTION, **GREEDY)
    assert_as_declared(message)
    assert message.id.startswith("msg_")
    assert message.stop_reason == "max_tokens"
    assert message.stop_sequence is None
    async with Client(edge.cluster.address) as over_grpc:
        same = await over_grpc.complete([("user", "Tell me a story about a fox.")], max_tokens=24, temperature=0.0)
    assert text_of(message) == same.text
    assert message.usage.output_tokens == 24
    alike = await async_client.messages.create(model=edge.model, messages=QUESTION, **GREEDY)
    assert text_of(alike) == same.text


async def test_a_stream_gives_its_events_in_order(
    client: "Anthropic", async_client: "AsyncAnthropic", edge: Edge
) -> None:
    whole = client.messages.create(model=edge.model, messages=QUESTION, **GREEDY)
    events = list(client.messages.create(model=edge.model, messages=QUESTION, stream=True, **GREEDY))
    for event in events:
        assert_as_declared(event)
    types = [event.type for event in events]
    deltas = types.count("content_block_delta")  # a busy router puts several tokens into one
    assert types == [
        "message_start",
        "content_block_start",
        *["content_block_delta"] * deltas,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    with client.messages.stream(model=edge.model, messages=QUESTION, **GREEDY) as stream:
        pieces = list(stream.text_stream)
        final = stream.get_final_message()
    assert "".join(pieces) == text_of(final) == text_of(whole)
    assert final.stop_reason == "max_tokens"
    assert final.usage.output_tokens == 24
    assert final.usage.input_tokens == whole.usage.input_tokens
    async with async_client.messages.stream(model=edge.model, messages=QUESTION, **GREEDY) as async_stream:
        assert await async_stream.get_final_text() == text_of(whole)


def test_an_answer_ends_its_turn_or_at_a_stop_sequence(client: "Anthropic", edge: Edge) -> None:
    # Coding assistants always ask for tens of thousands of tokens: more than the context is no error.
    asked: dict[str, Any] = {"max_tokens": 20_000, "extra_body": {"temperature": 0.0}}
    whole = client.messages.create(model=edge.model, messages=QUESTION, **asked)
    assert whole.stop_reason == "end_turn"
    cut = client.messages.create(model=edge.model, messages=QUESTION, stop_sequences=[" the"], **asked)
    assert cut.stop_reason == "stop_sequence"
    assert cut.stop_sequence == " the"
    assert text_of(cut) == text_of(whole)[: text_of(whole).index(" the")]


def test_system_texts_blocks_and_a_begun_answer_are_rendered(client: "Anthropic", edge: Edge) -> None:
    def answer(**options: Any) -> str:
        return text_of(client.messages.create(model=edge.model, **GREEDY, **options))

    told = answer(messages=QUESTION, system="Be kind.")
    blocks: Any = [{"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}}]
    assert answer(messages=QUESTION, system=blocks) == told
    parts: Any = [{"role": "user", "content": [{"type": "text", "text": "Tell me a story about a fox."}]}]
    plain = answer(messages=QUESTION)
    assert answer(messages=parts) == plain
    end = plain.index(",") + 1  # between words: a part of one has other tokens than the whole one
    begun: Any = [*QUESTION, {"role": "assistant", "content": plain[:end]}]
    assert answer(messages=begun).startswith(plain[end:])


async def test_counted_tokens_are_those_of_the_answer(
    client: "Anthropic", async_client: "AsyncAnthropic", edge: Edge
) -> None:
    message = client.messages.create(model=edge.model, messages=QUESTION, system="Be kind.", **GREEDY)
    counted = client.messages.count_tokens(model=edge.model, messages=QUESTION, system="Be kind.")
    assert_as_declared(counted)
    usage = message.usage
    parts = (usage.input_tokens, usage.cache_read_input_tokens, usage.cache_creation_input_tokens)
    assert counted.input_tokens == sum(part or 0 for part in parts)
    alike = await async_client.messages.count_tokens(model=edge.model, messages=QUESTION, system="Be kind.")
    assert alike.input_tokens == counted.input_tokens


def test_errors_have_the_type_and_shape_that_the_client_knows(client: "Anthropic", edge: Edge) -> None:
    import anthropic

    with pytest.raises(anthropic.NotFoundError) as unknown:
        client.messages.create(model="no-such-model", messages=QUESTION, max_tokens=8)
    assert unknown.value.type == "not_found_error"
    assert unknown.value.request_id
    refused: list[tuple[str, dict[str, Any]]] = [
        ("max_tokens", {"max_tokens": 0}),
        ("guided_json", {"max_tokens": 8, "extra_body": {"guided_json": {}}}),
        ("tools", {"max_tokens": 8, "tools": [{"name": "f", "input_schema": {"type": "object"}}]}),
    ]
    for name, options in refused:
        with pytest.raises(anthropic.BadRequestError) as invalid:
            client.messages.create(model=edge.model, messages=QUESTION, **options)
        assert invalid.value.type == "invalid_request_error"
        assert name in (invalid.value.api_message or "")
    image: Any = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
    with pytest.raises(anthropic.BadRequestError, match="image"):
        client.messages.create(model=edge.model, max_tokens=8, messages=[{"role": "user", "content": [image]}])
    with pytest.raises(anthropic.BadRequestError):
        client.messages.create(model=edge.model, messages=QUESTION, max_tokens=-1, stream=True)


def test_raw_answers_carry_the_request_id(client: "Anthropic", edge: Edge) -> None:
    raw = client.messages.with_raw_response.create(model=edge.model, messages=QUESTION, **GREEDY)
    assert raw.headers["request-id"]
    assert raw.parse()._request_id == raw.headers["request-id"]


def test_a_client_that_gives_up_gets_its_own_time_out(client: "Anthropic", edge: Edge) -> None:
    import anthropic

    with pytest.raises(anthropic.APITimeoutError):
        client.with_options(timeout=0.05).messages.create(
            model=edge.model, messages=QUESTION, max_tokens=900, extra_body={"ignore_eos": True, "temperature": 1.0}
        )

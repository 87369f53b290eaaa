"""OpenAI's own Python client against /v1/responses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.clients.edge import Edge

if TYPE_CHECKING:
    from openai import AsyncOpenAI, OpenAI
    from openai.types.responses import Response

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_output_tokens": 24}
ENDED: dict[str, Any] = {**GREEDY, "extra_body": {"stop": ["."]}}  # after the first sentence
QUESTION = "Tell me a story about a fox."


def assert_as_declared(answer: Any) -> None:
    """The client builds its objects without checking them; this checks what the server really sent."""
    type(answer).model_validate(answer.to_dict())


async def test_sync_async_and_string_or_list_inputs_give_the_text_of_the_chat(
    client: OpenAI, async_client: AsyncOpenAI, edge: Edge
) -> None:
    chat = client.chat.completions.create(
        model=edge.model, messages=[{"role": "user", "content": QUESTION}], temperature=0.0, max_tokens=24
    )
    text = chat.choices[0].message.content
    answer = client.responses.create(model=edge.model, input=QUESTION, **GREEDY)
    assert_as_declared(answer)
    assert answer.output_text == text
    assert answer.id.startswith("resp_")
    listed = await async_client.responses.create(
        model=edge.model,
        input=[{"role": "user", "content": [{"type": "input_text", "text": QUESTION}]}],
        **GREEDY,
    )
    assert listed.output_text == text
    assert chat.usage is not None
    assert answer.usage is not None
    assert answer.usage.input_tokens == chat.usage.prompt_tokens
    assert answer.usage.output_tokens == 24


def test_an_answer_that_reaches_its_limit_is_incomplete_and_one_that_ends_is_completed(
    client: OpenAI, edge: Edge
) -> None:
    cut = client.responses.create(model=edge.model, input=QUESTION, **GREEDY)
    assert cut.status == "incomplete"
    assert cut.incomplete_details is not None
    assert cut.incomplete_details.reason == "max_output_tokens"
    assert cut.output[0].type == "message"
    assert cut.output[0].status == "incomplete"
    whole = client.responses.create(model=edge.model, input=QUESTION, temperature=0.0)
    assert whole.status == "completed"
    assert whole.incomplete_details is None
    assert whole.output_text.startswith(cut.output_text)


@pytest.mark.parametrize(("limit", "status"), [(8, "incomplete"), (24, "completed")])
def test_a_stream_gives_its_events_in_order(client: OpenAI, edge: Edge, limit: int, status: str) -> None:
    events = list(
        client.responses.create(model=edge.model, input=QUESTION, stream=True, **{**ENDED, "max_output_tokens": limit})
    )
    for event in events:
        assert_as_declared(event)
    types = [event.type for event in events]
    deltas = types.count("response.output_text.delta")  # a busy router puts several tokens into one
    assert types == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * deltas,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        f"response.{status}",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    last: Response = events[-1].response
    assert last.status == status
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == last.output_text
    assert last.usage is not None
    same = client.responses.create(model=edge.model, input=QUESTION, **{**ENDED, "max_output_tokens": limit})
    assert same.output_text == last.output_text


async def test_the_accumulating_helpers_end_with_the_whole_response(
    client: OpenAI, async_client: AsyncOpenAI, edge: Edge
) -> None:
    with client.responses.stream(model=edge.model, input=QUESTION, **ENDED) as stream:
        final = stream.get_final_response()
    async with async_client.responses.stream(model=edge.model, input=QUESTION, **ENDED) as async_stream:
        alike = await async_stream.get_final_response()
    assert final.status == "completed"
    assert final.output_text == alike.output_text
    assert len(final.output_text) > 20


async def test_a_stored_response_can_be_read_continued_and_deleted(
    client: OpenAI, async_client: AsyncOpenAI, edge: Edge
) -> None:
    import openai  # takes a second, and collecting must not

    first = client.responses.create(model=edge.model, input=QUESTION, store=True, **GREEDY)
    assert client.responses.retrieve(first.id).to_dict() == first.to_dict()
    assert (await async_client.responses.retrieve(first.id)).output_text == first.output_text
    second = client.responses.create(
        model=edge.model, input="Go on.", previous_response_id=first.id, store=True, **GREEDY
    )
    spelt_out = client.responses.create(
        model=edge.model,
        input=[
            {"role": "user", "content": QUESTION},
            {"role": "assistant", "content": first.output_text},
            {"role": "user", "content": "Go on."},
        ],
        **GREEDY,
    )
    assert second.previous_response_id == first.id
    assert second.output_text == spelt_out.output_text
    assert second.usage is not None
    assert spelt_out.usage is not None
    assert second.usage.input_tokens == spelt_out.usage.input_tokens
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.delete(first.id)
    with pytest.raises(openai.APIStatusError) as gone:
        client.responses.create(model=edge.model, input="Go on.", previous_response_id=first.id, **GREEDY)
    assert gone.value.status_code in (400, 404)
    assert gone.value.param == "previous_response_id"


def test_a_response_that_is_not_stored_cannot_be_read(client: OpenAI, edge: Edge) -> None:
    import openai

    answer = client.responses.create(model=edge.model, input=QUESTION, store=False, **GREEDY)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(answer.id)


def test_instructions_stand_before_the_input(client: OpenAI, edge: Edge) -> None:
    told = client.responses.create(model=edge.model, instructions="Be kind.", input=QUESTION, **GREEDY)
    chat = client.chat.completions.create(
        model=edge.model,
        messages=[{"role": "system", "content": "Be kind."}, {"role": "user", "content": QUESTION}],
        temperature=0.0,
        max_tokens=24,
    )
    assert told.output_text == chat.choices[0].message.content
    assert told.instructions == "Be kind."


@pytest.mark.parametrize(
    ("field", "name"),
    [
        ({"background": True}, "background"),
        ({"tools": [{"type": "computer_use_preview"}]}, "tools"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"extra_body": {"guided_json": {}}}, "guided_json"),
    ],
)
def test_what_is_not_served_is_refused_by_name(client: OpenAI, edge: Edge, field: dict[str, Any], name: str) -> None:
    import openai

    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(model=edge.model, input=QUESTION, **field)
    assert refused.value.param is not None
    assert refused.value.param.startswith(name)

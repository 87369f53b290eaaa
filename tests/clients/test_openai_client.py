"""OpenAI's own Python client, as it comes, against every endpoint."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.clients.edge import Edge
from tests.cluster.processes import wait_until
from trunkline import Client

if TYPE_CHECKING:
    from openai import AsyncOpenAI, OpenAI
    from openai.types import Completion
    from openai.types.chat import ChatCompletion, ChatCompletionChunk, ChatCompletionMessageParam

PROMPT = "Once upon a time"
CHAT: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Tell me a story about a fox."}]
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 24}


def assert_as_declared(answer: Any) -> None:
    """The client builds its objects without checking them; this checks what the server really sent."""
    type(answer).model_validate(answer.to_dict())


# --- completions ---------------------------------------------------------------------------------------------------


async def test_a_completion_is_the_text_that_grpc_gives(client: OpenAI, edge: Edge) -> None:
    answer = client.completions.create(model=edge.model, prompt=PROMPT, **GREEDY)
    assert_as_declared(answer)
    assert answer.object == "text_completion"
    assert answer.model == edge.model
    assert answer.id.startswith("cmpl-")
    async with Client(edge.cluster.address) as over_grpc:
        same = await over_grpc.complete(PROMPT, **GREEDY)
    assert answer.choices[0].text == same.text
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].logprobs is None
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 24
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 24


async def test_sync_async_and_streamed_completions_are_equal(
    client: OpenAI, async_client: AsyncOpenAI, edge: Edge
) -> None:
    whole = client.completions.create(model=edge.model, prompt=PROMPT, **GREEDY).choices[0].text
    alike = await async_client.completions.create(model=edge.model, prompt=PROMPT, **GREEDY)
    assert alike.choices[0].text == whole
    chunks: list[Completion] = list(client.completions.create(model=edge.model, prompt=PROMPT, stream=True, **GREEDY))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[-1].choices[0].finish_reason == "length"
    stream = await async_client.completions.create(model=edge.model, prompt=PROMPT, stream=True, **GREEDY)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == whole


def test_a_prompt_may_be_text_token_ids_or_lists_of_either(client: OpenAI, edge: Edge) -> None:
    scored = client.completions.create(model=edge.model, prompt=[[0, 300, 301], [0, 300]], max_tokens=4, temperature=0)
    single = client.completions.create(model=edge.model, prompt=[0, 300], max_tokens=4, temperature=0)
    assert [choice.index for choice in scored.choices] == [0, 1]
    assert scored.choices[1].text == single.choices[0].text
    texts = client.completions.create(model=edge.model, prompt=[PROMPT, "A fox"], n=2, max_tokens=4, temperature=0)
    assert [choice.index for choice in texts.choices] == [0, 1, 2, 3]
    assert texts.choices[0].text == texts.choices[1].text != texts.choices[2].text
    assert texts.usage is not None
    assert texts.usage.completion_tokens == 16
    alone = [client.completions.create(model=edge.model, prompt=text, max_tokens=1) for text in (PROMPT, "A fox")]
    assert texts.usage.prompt_tokens == sum(answer.usage.prompt_tokens for answer in alone if answer.usage)


def test_echo_scores_the_prompt_and_only_it(client: OpenAI, edge: Edge) -> None:
    answer = client.completions.create(
        model=edge.model, prompt=PROMPT, echo=True, logprobs=2, max_tokens=3, temperature=0
    )
    [choice] = answer.choices
    assert choice.text.startswith(PROMPT)
    assert choice.logprobs is not None
    assert choice.logprobs.tokens is not None
    assert choice.logprobs.token_logprobs is not None
    assert choice.logprobs.top_logprobs is not None
    assert choice.logprobs.text_offset is not None
    assert answer.usage is not None
    count = answer.usage.prompt_tokens + 3
    assert (
        len(choice.logprobs.tokens) == len(choice.logprobs.token_logprobs) == len(choice.logprobs.text_offset) == count
    )
    assert choice.logprobs.token_logprobs[0] is None, "nothing comes before the first token"
    assert choice.logprobs.top_logprobs[0] is None
    for own, best in zip(choice.logprobs.token_logprobs[1:], choice.logprobs.top_logprobs[1:], strict=True):
        assert own <= max(best.values()) <= 0.0
        assert 1 <= len(best) <= 3
    only = client.completions.create(model=edge.model, prompt=PROMPT, echo=True, logprobs=0, max_tokens=0)
    assert only.choices[0].text == PROMPT
    assert only.choices[0].logprobs is not None
    assert only.choices[0].logprobs.token_logprobs is not None
    assert only.choices[0].logprobs.token_logprobs[1:] == pytest.approx(
        choice.logprobs.token_logprobs[1 : answer.usage.prompt_tokens], abs=1e-5
    )


def test_usage_comes_last_when_asked_for_and_in_every_chunk_when_continuous(client: OpenAI, edge: Edge) -> None:
    asked = list(
        client.completions.create(
            model=edge.model, prompt=PROMPT, stream=True, stream_options={"include_usage": True}, **GREEDY
        )
    )
    assert asked[-1].choices == []
    assert asked[-1].usage is not None
    assert asked[-1].usage.completion_tokens == 24
    assert all(chunk.usage is None for chunk in asked[:-1])
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    continuous = list(
        client.completions.create(model=edge.model, prompt=PROMPT, stream=True, stream_options=options, **GREEDY)
    )
    counts = [chunk.usage.completion_tokens for chunk in continuous if chunk.usage is not None]
    assert len(counts) == len(continuous)
    assert counts == sorted(counts)
    assert counts[-1] == 24


@pytest.mark.parametrize("field", [{"best_of": 2}, {"suffix": "the end"}])
def test_what_is_not_served_is_refused_by_name(client: OpenAI, edge: Edge, field: dict[str, Any]) -> None:
    import openai  # takes a second, and collecting must not

    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model=edge.model, prompt=PROMPT, **field)
    assert refused.value.param == next(iter(field))


# --- chat ----------------------------------------------------------------------------------------------------------


async def test_sync_async_and_streamed_chats_are_equal(client: OpenAI, async_client: AsyncOpenAI, edge: Edge) -> None:
    whole = client.chat.completions.create(model=edge.model, messages=CHAT, **GREEDY)
    assert_as_declared(whole)
    assert whole.id.startswith("chatcmpl-")
    text = whole.choices[0].message.content
    assert text
    assert whole.choices[0].message.role == "assistant"
    alike = await async_client.chat.completions.create(model=edge.model, messages=CHAT, **GREEDY)
    assert alike.choices[0].message.content == text
    chunks: list[ChatCompletionChunk] = list(
        client.chat.completions.create(model=edge.model, messages=CHAT, stream=True, **GREEDY)
    )
    for chunk in chunks:
        assert_as_declared(chunk)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:])
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [*[None] * (len(chunks) - 1), "length"]
    stream = await async_client.chat.completions.create(model=edge.model, messages=CHAT, stream=True, **GREEDY)
    assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == text


def test_the_accumulating_stream_helper_ends_with_the_whole_answer(client: OpenAI, edge: Edge) -> None:
    import openai

    ended: dict[str, Any] = {**GREEDY, "stop": ["."]}
    whole: ChatCompletion = client.chat.completions.create(model=edge.model, messages=CHAT, n=2, **ended)
    with client.chat.completions.stream(
        model=edge.model, messages=CHAT, n=2, stream_options={"include_usage": True}, **ended
    ) as stream:
        final = stream.get_final_completion()
    assert [choice.message.content for choice in final.choices] == [choice.message.content for choice in whole.choices]
    assert final.usage is not None
    assert whole.usage is not None
    assert final.usage.completion_tokens == whole.usage.completion_tokens
    # The helper takes no answer that reached its limit, whatever it was asked for.
    with (
        client.chat.completions.stream(model=edge.model, messages=CHAT, **GREEDY) as stream,
        pytest.raises(openai.LengthFinishReasonError) as cut,
    ):
        stream.get_final_completion()
    assert cut.value.completion.choices[0].finish_reason == "length"


def test_log_probabilities_spell_the_answer(client: OpenAI, edge: Edge) -> None:
    answer = client.chat.completions.create(model=edge.model, messages=CHAT, logprobs=True, top_logprobs=3, **GREEDY)
    assert_as_declared(answer)
    [choice] = answer.choices
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert len(choice.logprobs.content) == 24
    spelt = b"".join(bytes(token.bytes or []) for token in choice.logprobs.content)
    assert spelt.decode() == choice.message.content
    for token in choice.logprobs.content:
        assert len(token.top_logprobs) == 3
        assert token.logprob == token.top_logprobs[0].logprob, "greedy takes the likeliest"
        assert token.token == token.top_logprobs[0].token
    streamed = [
        token
        for chunk in client.chat.completions.create(
            model=edge.model, messages=CHAT, logprobs=True, top_logprobs=3, stream=True, **GREEDY
        )
        if chunk.choices[0].logprobs is not None
        for token in chunk.choices[0].logprobs.content or []
    ]
    assert [token.token for token in streamed] == [token.token for token in choice.logprobs.content]


def test_a_seed_repeats_a_sample_and_n_samples_differ(client: OpenAI, edge: Edge) -> None:
    def sample(seed: int) -> list[str | None]:
        answer = client.chat.completions.create(
            model=edge.model, messages=CHAT, n=3, seed=seed, temperature=1.5, max_completion_tokens=32
        )
        return [choice.message.content for choice in sorted(answer.choices, key=lambda choice: choice.index)]

    assert sample(7) == sample(7)
    assert len({*sample(7), *sample(8)}) > 3


def test_stop_texts_end_an_answer_before_them(client: OpenAI, edge: Edge) -> None:
    text: str = client.chat.completions.create(model=edge.model, messages=CHAT, **GREEDY).choices[0].message.content
    stop = [text[-6:], text[30:33]]
    cut = client.chat.completions.create(model=edge.model, messages=CHAT, stop=stop, **GREEDY).choices[0]
    assert cut.finish_reason == "stop"
    assert cut.message.content == text[: text.index(stop[1])]


def test_content_may_come_in_parts_and_a_developer_speaks_as_the_system(client: OpenAI, edge: Edge) -> None:
    def answer(messages: list[ChatCompletionMessageParam]) -> str | None:
        given: ChatCompletion = client.chat.completions.create(model=edge.model, messages=messages, **GREEDY)
        return given.choices[0].message.content

    parts: list[ChatCompletionMessageParam] = [
        {"role": "user", "content": [{"type": "text", "text": "Tell me a story about a fox."}]}
    ]
    assert answer(parts) == answer(CHAT)
    as_system = answer([{"role": "system", "content": "Be kind."}, *CHAT])
    assert answer([{"role": "developer", "content": "Be kind."}, *CHAT]) == as_system


def test_an_answer_can_be_sent_back_as_it_came(client: OpenAI, edge: Edge) -> None:
    first = client.chat.completions.create(model=edge.model, messages=CHAT, **GREEDY)
    history: Any = [*CHAT, first.choices[0].message, {"role": "user", "content": "Go on."}]
    dumped: Any = [*CHAT, first.choices[0].message.model_dump(), {"role": "user", "content": "Go on."}]
    answers = [
        client.chat.completions.create(model=edge.model, messages=messages, **GREEDY).choices[0].message.content
        for messages in (history, dumped)
    ]
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    ("part", "name"),
    [
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}, "image_url"),
        ({"type": "input_audio", "input_audio": {"data": "AA==", "format": "wav"}}, "input_audio"),
    ],
)
def test_images_and_audio_are_refused_by_name(client: OpenAI, edge: Edge, part: Any, name: str) -> None:
    import openai

    with pytest.raises(openai.BadRequestError, match=name):
        client.chat.completions.create(model=edge.model, messages=[{"role": "user", "content": [part]}])


# --- models --------------------------------------------------------------------------------------------------------


async def test_models_are_listed_and_found_by_name(client: OpenAI, async_client: AsyncOpenAI, edge: Edge) -> None:
    import openai

    [listed] = client.models.list().data
    assert_as_declared(listed)
    assert listed.id == edge.model
    assert [model.id async for model in async_client.models.list()] == [edge.model]
    assert client.models.retrieve(edge.model).to_dict() == listed.to_dict()
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("another/model")


# --- errors, headers, time-outs --------------------------------------------------------------------------------------


def test_errors_have_the_type_that_the_client_knows(client: OpenAI, edge: Edge) -> None:
    import openai

    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="no-such-model", messages=CHAT)
    assert unknown.value.code == "model_not_found"
    assert unknown.value.param == "model"
    assert unknown.value.type == "invalid_request_error"
    assert unknown.value.request_id
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model=edge.model, prompt=[300] * (edge.context_length + 1))
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as invalid:
        client.chat.completions.create(model=edge.model, messages=CHAT, temperature=-1)
    assert invalid.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as unheard_of:
        client.chat.completions.create(model=edge.model, messages=CHAT, extra_body={"guided_json": {}})
    assert unheard_of.value.param == "guided_json"
    with pytest.raises(openai.BadRequestError) as several:
        client.chat.completions.create(model=edge.model, messages=CHAT, n=0)
    assert several.value.param == "n"
    with pytest.raises(openai.BadRequestError) as generates:
        client.embeddings.create(model=edge.model, input="x", encoding_format="float")
    assert generates.value.param == "model"
    with pytest.raises(openai.NotFoundError):
        client.moderations.create(model=edge.model, input="x")


def test_a_refusal_of_a_stream_is_a_status_not_an_event(client: OpenAI, edge: Edge) -> None:
    import openai

    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model=edge.model, messages=CHAT, stream=True, top_p=2.0)


def test_raw_answers_carry_the_request_id_that_the_client_gave(client: OpenAI, edge: Edge) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model=edge.model, messages=CHAT, extra_headers={"X-Request-Id": "from-the-client-1"}, **GREEDY
    )
    assert raw.status_code == 200
    assert raw.headers["content-type"].startswith("application/json")
    assert raw.headers["x-request-id"] == raw.request_id == "from-the-client-1"
    assert raw.parse().choices[0].message.content == json.loads(raw.text)["choices"][0]["message"]["content"]
    with client.chat.completions.with_streaming_response.create(
        model=edge.model, messages=CHAT, stream=True, **GREEDY
    ) as streamed:
        assert streamed.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in streamed.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    assert all(line.startswith(("data: ", ":")) for line in lines)


def test_a_client_that_gives_up_gets_its_own_time_out_and_the_worker_stops(client: OpenAI, edge: Edge) -> None:
    import openai

    long: dict[str, Any] = {"max_tokens": edge.context_length - 64, "extra_body": {"ignore_eos": True}}
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.05).completions.create(model=edge.model, prompt=PROMPT, n=8, **long)
    stream = client.completions.create(model=edge.model, prompt=PROMPT, stream=True, **long)
    next(iter(stream))
    stream.close()
    wait_until(
        lambda: all(load.running == load.waiting == 0 for load in (worker.load() for worker in edge.cluster.workers)),
        "the workers stop what no client reads",
    )


def test_extra_fields_of_vllm_are_understood(client: OpenAI, edge: Edge) -> None:
    extra = {"top_k": 1, "min_tokens": 8, "ignore_eos": True, "repetition_penalty": 1.0, "min_p": 0.0}
    answer = client.completions.create(
        model=edge.model, prompt=PROMPT, max_tokens=8, temperature=1.0, extra_body={**extra, "return_token_ids": True}
    )
    greedy = client.completions.create(model=edge.model, prompt=PROMPT, max_tokens=8, temperature=0.0)
    assert answer.choices[0].text == greedy.choices[0].text, "top_k of 1 is greedy"
    token_ids = answer.choices[0].to_dict()["token_ids"]
    assert isinstance(token_ids, list)
    assert len(token_ids) == 8

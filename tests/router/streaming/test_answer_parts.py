"""The parts of an answer do not depend on how its output came and left: on cuts, merges, other choices, failover."""

from collections.abc import AsyncIterator
from contextlib import suppress
from random import Random

import pytest

from tests.router.streaming.streams import Told, stream_of
from tests.tagged_answers import TAGGED, TaggedParser, joined
from trunkline.answer.answer_parser import PARSERS, parsers_of
from trunkline.status import no_worker
from trunkline.v1.generation_pb2 import FinishReason, OutputChunk, TokenLogprobs
from trunkline.v1.inference_pb2 import AnswerPart, GenerateResponse, PromptInfo
from trunkline.v1.worker_pb2 import SequenceOutput
from trunkline_router.record.request_record import RequestRecord
from trunkline_router.request import client_buffer
from trunkline_router.request.request_stream import BrokenOff, RequestStream

ANSWERS = [
    '<think>größer < kleiner?</think>Two calls:\n<tool_call>{"name": "f", "arguments": {"x": "é</t"}}</tool_call>'
    '<tool_call>{"name": "g", "arguments": {}}</tool_call>',
    "no tags, but <thin",
    '<tool_call>{"name": "f", "arguments": {"cut": ["off',
    "<think>never ends 🦊",
]


def outputs(choice: int, rng: Random) -> list[SequenceOutput]:
    """The answer of a choice, cut at random; each output has a token, also those without text."""
    answer, at, made = ANSWERS[choice], 0, list[SequenceOutput]()
    while at < len(answer) or not made:
        text = answer[at : at + rng.choice([0, 1, 1, 2, 5, 40])]
        chunk = OutputChunk(
            index=choice,
            first_token_index=len(made),
            token_ids=[len(made)],
            text=text,
            text_offset=len(answer[:at].encode()),
            logprobs=[TokenLogprobs()],
        )
        made.append(SequenceOutput(chunk=chunk))
        at += len(text)
    made[-1].chunk.finish_reason = FinishReason.FINISH_REASON_STOP
    if rng.random() < 0.5:
        made[-1].chunk.stop_string = "###"
    return made


def parsed(choice: int) -> list[AnswerPart]:
    parser = TaggedParser()
    parts = joined([*parser.feed(ANSWERS[choice]), *parser.finish(FinishReason.FINISH_REASON_STOP)])
    for part in parts:
        part.index = choice
    return parts


async def until_lost(stream: RequestStream) -> AsyncIterator[GenerateResponse]:
    """The worker is lost; what was buffered until then."""
    stream.put(SequenceOutput(error=no_worker("lost").to_proto()))
    with suppress(BrokenOff):
        while (response := await stream.take()) is not None:
            yield response
    stream.begin("another", Told())


@pytest.mark.parametrize("seed", range(60))
async def test_an_answer_has_the_same_parts_however_it_streams(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PARSERS, TAGGED, TaggedParser)
    monkeypatch.setattr(client_buffer, "MAX_RESPONSE_BYTES", 200)
    rng, num_choices = Random(seed), len(ANSWERS)
    prompt, parsers = PromptInfo(model="m", prompt_tokens=9), parsers_of(TAGGED, num_choices)
    stream = stream_of(RequestRecord("r", 0.0, 0), num_choices, prompt, parsers=parsers)
    left = [outputs(choice, rng) for choice in range(num_choices)]
    num_tokens = sum(map(len, left))
    responses = list[GenerateResponse]()
    while any(left):
        coming = rng.choice([choice for choice in left if choice])
        stream.put(coming.pop(0))
        if rng.random() < 0.05 and any(left):
            responses += [response async for response in until_lost(stream)]
        elif rng.random() < 0.2 and stream.answer.prompt_known:
            response = await stream.take()
            assert response is not None
            responses.append(response)
    while (response := await stream.take()) is not None:
        responses.append(response)
    for choice in range(num_choices):
        chunks = [chunk for response in responses for chunk in response.chunks if chunk.index == choice]
        assert "".join(chunk.text for chunk in chunks) == ANSWERS[choice], "the output itself stays as it was"
        parts = [part for response in responses for part in response.parts if part.index == choice]
        assert joined(parts) == parsed(choice)
    assert responses[-1].usage.completion_tokens == num_tokens, "raw tokens are counted"

"""What waits for a client merges without losing anything."""

import asyncio

import pytest

from trunkline.status import RequestRefused, no_worker
from trunkline.v1.generation_pb2 import FinishReason, OutputChunk, PromptReport, TokenLogprob, TokenLogprobs
from trunkline.v1.inference_pb2 import PromptInfo
from trunkline.v1.worker_pb2 import SequenceOutput
from trunkline_router import request_stream
from trunkline_router.request_stream import RequestStream

STOP = FinishReason.FINISH_REASON_STOP
REPORT = PromptReport(prompt_tokens=9, cached_tokens=4)


def output(index: int = 0, first: int = 0, text: str = "ab", offset: int = 0, **more: object) -> SequenceOutput:
    prompt = REPORT if first == 0 else None
    chunk = OutputChunk(
        index=index,
        first_token_index=first,
        token_ids=[100 + first, 101 + first],
        text=text,
        text_offset=offset,
        logprobs=[TokenLogprobs(chosen=TokenLogprob(token_id=100 + first + i, rank=1)) for i in range(2)],
        **more,  # type: ignore[arg-type]
    )
    return SequenceOutput(handle=1, chunk=chunk, prompt=prompt)


def stream(choices: int = 1) -> RequestStream:
    return RequestStream("r", choices, PromptInfo(model="m", prompt_tokens=9))


async def test_chunks_of_one_choice_merge_into_one_and_keep_every_part() -> None:
    news = stream()
    news.put(output())
    news.put(output(first=2, text="", offset=2))
    news.put(output(first=4, text="cdé", offset=2, finish_reason=STOP, stop_string="STOP"))
    response = await news.take()
    assert response is not None
    (chunk,) = response.chunks
    assert list(chunk.token_ids) == [100, 101, 102, 103, 104, 105]
    assert (chunk.first_token_index, chunk.text, chunk.text_offset) == (0, "abcdé", 0)
    assert [entry.chosen.token_id for entry in chunk.logprobs] == list(chunk.token_ids)
    assert (chunk.finish_reason, chunk.stop_string) == (STOP, "STOP")
    assert response.usage.completion_tokens == 6
    assert response.prompt.cached_tokens == 4
    assert await news.take() is None


async def test_a_merged_chunk_starts_where_the_last_one_sent_ended() -> None:
    news = stream()
    news.put(output())
    first = await news.take()
    assert first is not None
    assert first.HasField("prompt")
    news.put(output(first=2, text="cd", offset=2))
    news.put(output(first=4, text="ef", offset=4))
    second = await news.take()
    assert second is not None
    assert not second.HasField("prompt")
    (chunk,) = second.chunks
    assert (chunk.first_token_index, chunk.text_offset, chunk.text) == (2, 2, "cdef")


async def test_merging_leaves_the_sessions_own_message_as_it_came() -> None:
    news, received = stream(), output()
    news.put(received)
    news.put(output(first=2, text="cd", offset=2))
    await news.take()
    assert (received.chunk.text, len(received.chunk.token_ids)) == ("ab", 2)


async def test_nothing_goes_out_before_the_first_choices_prompt_is_known() -> None:
    news = stream(choices=2)
    news.put(output(index=1))
    taking = asyncio.ensure_future(news.take())
    await asyncio.sleep(0)
    assert not taking.done()
    news.put(output(index=0))
    response = await taking
    assert response is not None
    assert sorted(chunk.index for chunk in response.chunks) == [0, 1]


async def test_a_choice_that_ends_before_its_first_token_ends_the_request() -> None:
    news = stream()
    news.put(SequenceOutput(chunk=OutputChunk(finish_reason=FinishReason.FINISH_REASON_ABORT)))
    response = await asyncio.wait_for(news.take(), 5)
    assert response is not None
    assert response.HasField("usage")
    assert await news.take() is None


async def test_the_usage_stands_on_the_last_response_only() -> None:
    news = stream(choices=2)
    news.put(output(index=0, finish_reason=STOP))
    first = await news.take()
    news.put(output(index=1, finish_reason=STOP))
    second = await news.take()
    assert first is not None
    assert second is not None
    assert (first.HasField("usage"), second.HasField("usage")) == (False, True)
    assert second.usage.completion_tokens == 4


async def test_the_first_error_counts() -> None:
    news = stream(choices=2)
    news.put(SequenceOutput(handle=1, error=no_worker("first").to_proto()))
    news.put(SequenceOutput(handle=2, error=no_worker("second").to_proto()))
    with pytest.raises(RequestRefused, match="first"):
        await news.take()


async def test_what_waits_is_bounded_in_bytes_over_all_choices_and_what_was_taken_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(request_stream, "MAX_WAITING_BYTES", 1000)
    news = stream(choices=2)
    gave_up: list[bool] = []
    news.on_overflow = lambda: gave_up.append(True)
    for step in range(50):  # 20 kB in all, taken as they come
        news.put(output(first=2 * step, text="x" * 200))
        news.put(output(index=1, first=2 * step, text="x" * 200))
        await news.take()
    for step in range(50, 52):
        news.put(output(first=2 * step, text="x" * 200))
        news.put(output(index=1, first=2 * step, text="x" * 200))
    assert not gave_up
    news.put(output(index=1, first=104, text="x" * 200))
    assert gave_up == [True]
    with pytest.raises(RequestRefused, match="reads too slowly") as caught:
        await news.take()
    assert caught.value.reason == "OVERLOADED"
    assert news.has_output, "and so it is not tried elsewhere"
    news.put(output(first=104, text="x" * 2000))
    news.put(output(first=106, text="x" * 2000))
    assert gave_up == [True]

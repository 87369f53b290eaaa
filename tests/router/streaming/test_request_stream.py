"""What waits for a client merges without losing anything."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import pytest

from tests.router.streaming.streams import Told, stream_of
from trunkline.status import RequestRefused, no_worker
from trunkline.v1.generation_pb2 import (
    FinishReason,
    OutputChunk,
    PromptReport,
    Score,
    TokenLogprob,
    TokenLogprobs,
    Vector,
)
from trunkline.v1.inference_pb2 import GenerateResponse, PromptInfo
from trunkline.v1.worker_pb2 import OutputKind, SequenceOutput, Submit, Timeline, Work
from trunkline_router.quotas.reservation import OutputMeter
from trunkline_router.record.request_record import RequestRecord
from trunkline_router.request import client_buffer, request_stream
from trunkline_router.request.client_buffer import Backlog
from trunkline_router.request.request_stream import BrokenOff, RequestStream

STOP = FinishReason.FINISH_REASON_STOP
REPORT = PromptReport(prompt_tokens=9, cached_tokens=4)


def record(name: str) -> RequestRecord:
    return RequestRecord(name, 0.0, 0)


def output(
    index: int = 0,
    first: int = 0,
    text: str = "ab",
    offset: int = 0,
    timeline: Timeline | None = None,
    **more: object,
) -> SequenceOutput:
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
    return SequenceOutput(handle=1, chunk=chunk, prompt=prompt, timeline=timeline)


def stream(choices: int = 1) -> RequestStream:
    return stream_of(record("r"), choices, PromptInfo(model="m", prompt_tokens=9))


async def taken(news: RequestStream) -> AsyncIterator[GenerateResponse]:
    while (response := await asyncio.wait_for(news.take(), 60)) is not None:
        yield response


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


async def test_the_attempt_is_told_the_timeline_of_each_choice_that_ends_there() -> None:
    news, told = stream(choices=2), Told()
    news.begin("a", told)
    timelines = [Timeline(ended_s=float(choice)) for choice in range(2)]
    news.put(output(timeline=Timeline(ended_s=9.0)))
    assert not told.timelines, "the choice goes on"
    finish = {"first": 2, "text": "", "offset": 2, "finish_reason": STOP}
    news.put(output(**finish, timeline=timelines[0]))  # type: ignore[arg-type]
    error = no_worker("the engine died").to_proto()
    news.put(SequenceOutput(handle=2, error=error, timeline=timelines[1]))
    assert told.timelines == timelines


@pytest.mark.parametrize(
    ("waited_s", "has_more", "stalled_s"), [(5.0, True, 5.0), (5.0, False, 0.0), (0.05, True, 0.0)]
)
async def test_time_in_which_output_waits_for_the_client_is_noted(
    waited_s: float, has_more: bool, stalled_s: float
) -> None:
    noted = record("r")
    news = stream_of(noted, 1, PromptInfo(model="m", prompt_tokens=9))
    news.put(output())
    await news.take()
    assert noted.first_token_s == news.handed_s
    news.handed_s -= waited_s  # so long the first response took to be written
    if has_more:
        news.put(output(first=2, text="cd", offset=2))
        await news.take()
    assert noted.stalled_s == pytest.approx(stalled_s, abs=0.5)


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
    response = await asyncio.wait_for(news.take(), 60)
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
    news.put(SequenceOutput(handle=2, error=no_worker("second").to_proto(), suspect=True))
    with pytest.raises(BrokenOff, match="first") as caught:
        await news.take()
    assert caught.value.suspect, "whichever choice was in the step"


async def test_what_came_before_a_break_is_handed_out_first_and_the_break_is_told_at_once() -> None:
    news, told = stream(), Told()
    news.begin("w", told)
    news.put(output())
    news.put(SequenceOutput(handle=1, error=no_worker("lost").to_proto()))
    assert told.heard == ["broke off"], "the client may be slow to read"
    response = await news.take()
    assert response is not None
    assert list(response.chunks[0].token_ids) == [100, 101]
    with pytest.raises(BrokenOff, match="lost"):
        await news.take()


async def test_the_next_attempt_goes_on_where_the_ledger_ends() -> None:
    news = stream(choices=2)
    news.put(output())
    news.put(output(index=1, finish_reason=STOP))
    news.put(SequenceOutput(handle=1, error=no_worker("lost").to_proto()))
    await news.take()
    news.begin("other", Told())
    ((choice, ledger),) = news.answer.unfinished()
    resume = ledger.resume()
    assert resume is not None
    assert (choice, list(resume.output_token_ids), resume.text_bytes_sent) == (0, [100, 101], 2)
    news.put(output(first=2, text="cd", offset=2, finish_reason=STOP))
    response = await news.take()
    assert response is not None
    assert (response.chunks[0].first_token_index, response.usage.completion_tokens) == (2, 6)


@pytest.mark.parametrize(("first", "offset"), [(0, 0), (1, 2), (4, 2), (2, 1), (2, 3)])
async def test_a_worker_that_repeats_or_leaves_out_output_is_broken_off_and_nothing_of_it_is_told(
    first: int, offset: int
) -> None:
    news = stream()
    news.put(output())
    await news.take()
    news.put(output(first=first, offset=offset))
    with pytest.raises(BrokenOff, match="lost its place"):
        await news.take()
    assert news.answer.completion_tokens == 2


async def test_an_answer_too_long_to_remember_stays_with_its_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_stream, "MAX_LEDGER_BYTES", 12)
    news = stream_of(record("r"), 1, PromptInfo())
    news.put(output())
    assert news.answer.can_resume
    news.put(output(first=2, text="cd", offset=2))
    assert not news.answer.can_resume
    response = await news.take()
    assert response is not None
    assert len(response.chunks[0].token_ids) == 4, "which does not touch the answer"


async def test_what_workers_bring_is_metered_taken_or_not_and_over_all_choices() -> None:
    meter = OutputMeter()
    news = stream_of(record("r"), 2, PromptInfo(), meter=meter)
    news.put(output())
    news.put(output(index=1))
    assert meter.tokens == 4
    news.put(output(first=2, offset=2))
    assert (meter.tokens, news.answer.completion_tokens) == (6, 6)


async def test_progress_is_told_in_steps_by_attempt_and_choice() -> None:
    news, first, second = stream(choices=2), Told(is_watched=True), Told(is_watched=True)
    news.begin("w", first)
    news.put(output())
    news.put(output(index=1))
    news.put(output(first=2, offset=2, finish_reason=STOP))
    assert first.heard == [0, 1, 1], "each of several tokens"
    news.put(SequenceOutput(error=no_worker("lost").to_proto()))
    news.begin("other", second)
    news.put(output(index=1, first=2, offset=2))
    assert second.heard == [1], "of the one choice that is left"
    assert first.heard == [0, 1, 1, "broke off"]


async def test_what_waits_is_bounded_in_bytes_over_all_choices_and_what_was_taken_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client_buffer, "MAX_WAITING_BYTES", 2000)
    news = stream(choices=2)
    told = Told()
    news.begin("w", told)

    def put(step: int, index: int = 0, size: int = 200) -> None:
        news.put(output(index=index, first=2 * step, text="x" * size, offset=200 * step))

    for step in range(50):  # 20 kB in all, taken as they come
        put(step)
        put(step, index=1)
        await news.take()
    for step in range(50, 52):
        put(step)
        put(step, index=1)
    assert not told.heard
    put(52, index=1)
    assert told.heard == ["gave up"]
    with pytest.raises(RequestRefused, match="reads too slowly") as caught:
        await news.take()
    assert caught.value.reason == "OVERLOADED"
    assert news._record.fell_behind
    assert news.answer.has_output, "and so it is not tried elsewhere"
    put(52, size=2000)
    assert told.heard == ["gave up"]


async def test_what_waits_leaves_in_responses_of_bounded_size_and_nothing_of_it_is_lost_or_repeated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client_buffer, "MAX_RESPONSE_BYTES", 1000)
    backlog = Backlog()
    news = stream_of(record("r"), 2, PromptInfo(model="m", prompt_tokens=9), backlog=backlog)
    steps, texts = 40, ("é" * 60, "z" * 90)
    for step in range(steps):
        for index, text in enumerate(texts):
            if step < steps - index:  # the second choice ends earlier
                end: dict[str, Any] = {"finish_reason": STOP} if step == steps - index - 1 else {}
                news.put(output(index, first=2 * step, text=text, offset=len(text.encode()) * step, **end))
    responses = [response async for response in taken(news)]
    assert max(response.ByteSize() for response in responses) < 1000 + 400, "and the chunk that filled it"
    assert len(responses) < steps / 2
    for index, text in enumerate(texts):
        chunks = [chunk for response in responses for chunk in response.chunks if chunk.index == index]
        tokens, offset = list[int](), 0
        for chunk in chunks:
            assert (chunk.first_token_index, chunk.text_offset) == (len(tokens), offset)
            assert [entry.chosen.token_id for entry in chunk.logprobs] == list(chunk.token_ids)
            tokens += chunk.token_ids
            offset += len(chunk.text.encode())
        assert tokens == list(range(100, 100 + 2 * (steps - index)))
        assert "".join(chunk.text for chunk in chunks) == text * (steps - index)
        assert [chunk.finish_reason for chunk in chunks] == [0] * (len(chunks) - 1) + [STOP]
    assert [response.HasField("prompt") for response in responses] == [True] + [False] * (len(responses) - 1)
    assert [response.HasField("usage") for response in responses] == [False] * (len(responses) - 1) + [True]
    assert responses[-1].usage.completion_tokens == 2 * (2 * steps - 1)
    assert backlog.waiting_bytes == 0


async def test_what_is_taken_in_part_waits_no_longer_and_a_break_comes_after_the_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client_buffer, "MAX_RESPONSE_BYTES", 1000)
    backlog = Backlog()
    news = stream_of(record("r"), 1, PromptInfo(), backlog=backlog)
    for step in range(9):
        news.put(output(first=2 * step, text="x" * 200, offset=200 * step))
    news.put(SequenceOutput(handle=1, error=no_worker("lost").to_proto()))
    waiting, num_tokens = [backlog.waiting_bytes], 0
    while num_tokens < 18:
        response = await news.take()
        assert response is not None
        num_tokens += len(response.chunks[0].token_ids)
        waiting.append(backlog.waiting_bytes)
    assert len(waiting) > 2
    assert waiting[1:] == sorted(set(waiting[1:]), reverse=True)
    assert waiting[-1] > 0, "the last response has not left yet"
    with pytest.raises(BrokenOff, match="lost"):
        await news.take()
    assert backlog.waiting_bytes == 0


async def test_a_long_prompts_log_probabilities_are_a_response_by_themselves() -> None:
    logprobs = [TokenLogprobs(chosen=TokenLogprob(token_id=1000, logprob=-1.5, rank=9)) for _ in range(40_000)]
    news = stream()
    news.put(SequenceOutput(chunk=output().chunk, prompt=PromptReport(prompt_tokens=40_000, logprobs=logprobs)))
    news.put(output(first=2, offset=2, finish_reason=STOP))
    first, second = [response async for response in taken(news)]
    assert (len(first.prompt.logprobs), len(first.chunks), first.HasField("usage")) == (40_000, 0, False)
    assert (second.HasField("prompt"), len(second.chunks[0].token_ids), second.HasField("usage")) == (False, 4, True)


async def test_a_backlog_counts_what_has_merged_until_it_has_left_or_nobody_will_take_it() -> None:
    backlog = Backlog()
    first, second = (stream_of(record(name), 1, PromptInfo(), backlog=backlog) for name in "ab")
    for news in (first, second):
        news.put(output())
    assert backlog.waiting_bytes == 0, "as it came"
    for news in (first, second):
        news.put(output(first=2, offset=2))
    both = backlog.waiting_bytes
    await first.take()
    assert backlog.waiting_bytes == both / 2 * (1 + client_buffer.RESPONSE_COST), "on its way it takes more than before"
    first.put(output(first=4, offset=4, finish_reason=STOP))
    await first.take()
    assert 0 < backlog.waiting_bytes == both / 2, "what was taken before has left"
    second.close()
    assert backlog.waiting_bytes == 0


async def test_chunks_that_fill_a_response_each_by_itself_count_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them refers to its step's whole message as long as it is kept as it came."""
    monkeypatch.setattr(client_buffer, "MAX_RESPONSE_BYTES", 1000)
    backlog = Backlog()
    news = stream_of(record("r"), 16, PromptInfo(), backlog=backlog)
    num_bytes = 0
    for step in range(4):
        for index in range(16):
            news.put(brought := output(index, first=2 * step, text="x" * 2000, offset=2000 * step))
            num_bytes += brought.chunk.ByteSize() if step else 0
    assert backlog.waiting_bytes > num_bytes
    news.close()


async def test_responses_that_do_not_leave_count_against_what_may_wait() -> None:
    """Clients whose transport is full: what each was given last stays in memory."""
    backlog = Backlog(max_bytes=10_000)
    streams = [stream_of(record(str(number)), 1, PromptInfo(), backlog=backlog) for number in range(9)]
    told = [Told() for _ in streams]
    for number, news in enumerate(streams):
        news.begin("w", told[number])
        for step in range(3):
            news.put(output(first=2 * step, text="x" * 200, offset=200 * step))
    assert backlog.waiting_bytes < 10_000
    for news in streams:
        with suppress(RequestRefused):
            await news.take()
        assert backlog.waiting_bytes <= 10_000
    assert any(attempt.heard == ["gave up"] for attempt in told)
    assert not all(attempt.heard for attempt in told)
    for news in streams:
        news.close()
    assert backlog.waiting_bytes == 0


async def test_past_the_backlogs_bound_the_stream_that_is_furthest_behind_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client_buffer, "RESPONSE_COST", 0)
    backlog = Backlog(max_bytes=6000)
    streams = [stream_of(record(str(number)), 1, PromptInfo(), backlog=backlog) for number in range(3)]
    told = [Told() for _ in streams]
    for number, news in enumerate(streams):
        news.begin("w", told[number])
        news.put(output())
        news.put(output(first=2, text="x" * (200, 1500, 200)[number], offset=2))
    assert not any(attempt.heard for attempt in told)
    streams[0].put(output(first=4, text="x" * 1200, offset=202))
    assert [attempt.heard for attempt in told] == [[], ["gave up"], []], "not the one that has just grown"
    with pytest.raises(RequestRefused, match="were waiting for all clients") as caught:
        await streams[1].take()
    assert caught.value.reason == "OVERLOADED"
    for news in (streams[0], streams[2]):
        response = await news.take()
        assert response is not None
        news.close()
    assert backlog.waiting_bytes == 0


async def test_vectors_that_wait_count_until_they_are_taken_and_end_the_request_that_is_furthest_behind() -> None:
    vector = SequenceOutput(prompt=REPORT, vector=Vector(values=bytes(1000)))
    backlog = Backlog(max_bytes=6 * vector.ByteSize())
    first, second = (stream_of(record(name), 4, PromptInfo(), backlog=backlog) for name in "ab")
    told = Told()
    second.begin("w", told)
    for index in range(2):
        first.put_whole(index, 9, vector)
    for index in range(4):
        second.put_whole(index, 9, vector)
    assert backlog.waiting_bytes == 6 * vector.ByteSize()
    assert not told.heard
    await first.take()
    assert backlog.waiting_bytes == 5 * vector.ByteSize(), "one was taken"
    for index in range(2, 4):
        first.put_whole(index, 9, vector)
    assert told.heard == ["gave up"]
    with pytest.raises(RequestRefused, match="reads too slowly"):
        await second.take()
    assert backlog.waiting_bytes == 3 * vector.ByteSize() == first.num_untaken * vector.ByteSize()
    first.close()
    assert backlog.waiting_bytes == first.num_untaken == 0


@pytest.mark.parametrize("whole", [{"vector": Vector(values=b"1234")}, {"score": Score(values=[0.5])}])
async def test_an_output_without_tokens_comes_with_the_usage_and_counts_none(whole: dict[str, Any]) -> None:
    meter, told = OutputMeter(), Told()
    news = stream_of(record("r"), 1, PromptInfo(model="m", prompt_tokens=9), meter=meter)
    submit = Submit(prompt_token_ids=range(9), work=Work(output=OutputKind.OUTPUT_KIND_VECTOR))
    news.begin("a", told)
    news.sink(submit)
    news.put_whole(0, 9, SequenceOutput(error=no_worker("lost").to_proto()))
    with pytest.raises(BrokenOff):
        await news.take()
    assert meter.inputs.tokens == 0, "it was lost"
    news.begin("b", told)
    news.sink(submit)
    news.put_whole(0, 9, SequenceOutput(prompt=REPORT, timeline=Timeline(ended_s=1.0), **whole))
    assert news.has_ended
    response = await news.take()
    assert response is not None
    assert [getattr(response, kind) for kind in whole] == list(whole.values())
    assert [chunk.finish_reason for chunk in response.chunks] == [STOP]
    assert (response.prompt.cached_tokens, response.usage.completion_tokens, meter.tokens) == (4, 0, 0)
    assert (len(told.timelines), told.computed_tokens, meter.inputs.tokens) == (1, 9, 9)
    assert await news.take() is None


async def test_a_vector_that_comes_twice_ends_its_request_alone() -> None:
    told = Told()
    news = stream_of(record("r"), 2, PromptInfo(model="m", prompt_tokens=9))
    news.begin("a", told)
    vector = SequenceOutput(prompt=REPORT, vector=Vector(values=b"1234"))
    assert news.put_whole(0, 9, vector)
    assert news.put_whole(0, 9, vector), "the caller delivers the outputs of others too"
    with pytest.raises(RequestRefused) as refused:
        await news.take()
    assert refused.value.reason == "INTERNAL"

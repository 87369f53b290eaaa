"""Streams send in rounds, and rounds leave time for reading."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from tests.router.streaming.streams import stream_of
from trunkline.v1.generation_pb2 import FinishReason, OutputChunk, PromptReport
from trunkline.v1.inference_pb2 import PromptInfo
from trunkline.v1.worker_pb2 import SequenceOutput
from trunkline_router.record.request_record import RequestRecord
from trunkline_router.request import request_stream
from trunkline_router.request.request_stream import Fanout


def record(name: str) -> RequestRecord:
    return RequestRecord(name, 0.0, 0)


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Timers:
    """Stands in for the loop's: they go off when the test says so."""

    def __init__(self) -> None:
        self._set: list[tuple[float, Callable[[], None]]] = []

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> None:
        self._set.append((delay_s, callback))

    async def go_off(self) -> float:
        """The only one. Returns after how long it should have."""
        ((delay_s, callback),) = self._set
        self._set.clear()
        callback()
        await some_turns()
        return delay_s


@pytest.fixture
async def timers(monkeypatch: pytest.MonkeyPatch) -> Timers:
    mine = Timers()
    monkeypatch.setattr(asyncio.get_running_loop(), "call_later", mine.call_later)
    return mine


async def some_turns() -> None:
    """Of the event loop: more than a round needs."""
    for _ in range(10):
        await asyncio.sleep(0)


async def a_round_that_takes(duration_s: float, rounds: Fanout, clock: Clock) -> None:
    """Of one stream, whose writing takes so long."""
    due = asyncio.Event()

    async def write() -> None:
        await due.wait()
        clock.now_s += duration_s

    writing = asyncio.create_task(write())
    await asyncio.sleep(0)
    rounds.add(due)
    await some_turns()
    assert writing.done()


async def news_for(rounds: Fanout) -> asyncio.Event:
    """Of one stream; there are some turns of the loop for a round."""
    due = asyncio.Event()
    rounds.add(due)
    await some_turns()
    return due


async def test_streams_with_news_are_woken_together_and_at_once() -> None:
    rounds = Fanout(Clock())
    first, second = asyncio.Event(), asyncio.Event()
    rounds.add(first)
    rounds.add(second)
    assert not first.is_set()
    await some_turns()
    assert first.is_set()
    assert second.is_set()


async def test_after_a_round_the_next_one_waits_in_proportion_to_that_one(timers: Timers) -> None:
    clock = Clock()
    rounds = Fanout(clock)
    await a_round_that_takes(0.003, rounds, clock)
    clock.now_s += 0.001
    due = await news_for(rounds)
    assert not due.is_set()
    assert await timers.go_off() == pytest.approx(request_stream.REST_PER_ROUND * 0.003 - 0.001)
    assert due.is_set()


async def test_news_that_come_while_a_round_is_under_way_wait_like_those_after_it(timers: Timers) -> None:
    clock = Clock()
    rounds = Fanout(clock)
    first, second = asyncio.Event(), asyncio.Event()

    async def write() -> None:
        await first.wait()
        rounds.add(second)
        clock.now_s += 0.002

    writing = asyncio.create_task(write())
    await asyncio.sleep(0)
    rounds.add(first)
    await some_turns()
    assert writing.done()
    assert not second.is_set()
    assert await timers.go_off() == pytest.approx(request_stream.REST_PER_ROUND * 0.002)
    assert second.is_set()


async def test_news_after_that_time_do_not_wait() -> None:
    clock = Clock()
    rounds = Fanout(clock)
    await a_round_that_takes(0.003, rounds, clock)
    clock.now_s += request_stream.REST_PER_ROUND * 0.0031
    assert (await news_for(rounds)).is_set()


async def test_however_long_a_round_takes_the_wait_is_bounded(timers: Timers) -> None:
    clock = Clock()
    rounds = Fanout(clock)
    await a_round_that_takes(3600.0, rounds, clock)
    due = await news_for(rounds)
    assert await timers.go_off() == pytest.approx(request_stream.MOST_REST_S)
    assert due.is_set()


def token(place: int, **more: Any) -> SequenceOutput:
    chunk = OutputChunk(first_token_index=place, token_ids=[place], text="é", text_offset=2 * place, **more)
    return SequenceOutput(chunk=chunk, prompt=PromptReport() if not place else None)


async def test_the_first_response_waits_for_no_round_and_what_comes_between_rounds_leaves_in_one(
    timers: Timers,
) -> None:
    clock = Clock()
    rounds = Fanout(clock)
    await a_round_that_takes(0.003, rounds, clock)
    stream = stream_of(record("r"), 1, PromptInfo(), fanout=rounds)
    stream.put(token(0))
    first = await stream.take()
    assert first is not None
    taking = asyncio.ensure_future(stream.take())
    for place in (1, 2, 3):
        stream.put(token(place))
        await some_turns()
    assert not taking.done()
    await timers.go_off()
    response = taking.result()
    assert response is not None
    (chunk,) = response.chunks
    assert (chunk.first_token_index, list(chunk.token_ids), chunk.text) == (1, [1, 2, 3], "ééé")


async def test_the_last_response_waits_for_no_round() -> None:
    clock = Clock()
    rounds = Fanout(clock)
    stream = stream_of(record("r"), 1, PromptInfo(), fanout=rounds)
    stream.put(token(0))
    await stream.take()
    await a_round_that_takes(0.003, rounds, clock)
    taking = asyncio.ensure_future(stream.take())
    stream.put(token(1))
    stream.put(token(2, finish_reason=FinishReason.FINISH_REASON_STOP))
    await some_turns()
    response = taking.result()
    assert response is not None
    assert list(response.chunks[0].token_ids) == [1, 2]

"""An engine that no longer answers its front is killed, and one that only takes its time is not."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from trunkline.engine.v1.engine_pb2 import EngineResponse
from trunkline_worker.link import engine_link
from trunkline_worker.link.engine_link import EngineLink
from trunkline_worker.link.silence import Silence
from trunkline_worker.settings import EngineSettings

# Speaks as an engine does; each answer takes it as long as argv[1] says, as behind a step.
ENGINE = """
import socket, sys, time
from trunkline.engine.v1.engine_pb2 import EngineReady, EngineRequest, EngineResponse
from trunkline.v1.worker_pb2 import GetStatsResponse
from trunkline_worker.link.channel import FrameReader, frame

link = socket.socket(fileno=int(sys.argv[sys.argv.index("--socket-fd") + 1]))
link.sendall(frame(EngineResponse(ready=EngineReady())))
frames = FrameReader()
while data := link.recv(1 << 16):
    for payload in frames.feed(data):
        if EngineRequest.FromString(payload).want_stats:
            time.sleep(float(sys.argv[1]))
            link.sendall(frame(EngineResponse(stats=GetStatsResponse())))
"""
DEADLINE_S = 30.0  # for failures only


class Asked(EngineLink):
    """Knows how often its engine has answered."""

    def __init__(self, command: Sequence[str]) -> None:
        super().__init__(command)
        self.answers = 0
        self._answered = asyncio.Event()

    def _take(self, response: EngineResponse) -> None:
        super()._take(response)
        self.answers += 1
        self._answered.set()

    async def until_answers(self, count: int) -> None:
        while self.answers < count:
            self._answered.clear()
            await asyncio.wait_for(self._answered.wait(), DEADLINE_S)


@asynccontextmanager
async def linked(tmp_path: Path, step_s: float) -> AsyncIterator[tuple[Asked, asyncio.Event]]:
    """A link to such an engine, and what tells of the engine's death."""
    program = tmp_path / "engine.py"
    program.write_text(ENGINE)
    died = asyncio.Event()
    link = Asked((sys.executable, str(program), str(step_s)))
    await link.start(EngineSettings("m"))
    link.follow(lambda step: None, lambda reason: died.set())
    try:
        yield link, died
    finally:
        await link.stop()


@pytest.fixture(autouse=True)
def _ask_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_link, "QUESTION_PERIOD_S", 0.01)
    monkeypatch.setattr(engine_link, "SLICE_S", 0.05)  # of real time; each still counts as one of SLICE_S


@pytest.mark.parametrize(("step_timeout_s", "idle"), [(0.0, True), (10.0, False)])
async def test_an_engine_that_is_stopped_is_killed_and_counts_as_dead(
    tmp_path: Path, step_timeout_s: float, idle: bool
) -> None:
    async with linked(tmp_path, 0.0) as (link, died):
        watching = asyncio.create_task(link.kill_when_silent(Silence(step_timeout_s), lambda: idle))
        await link.until_answers(20)
        assert not watching.done()
        os.kill(link.pid, signal.SIGSTOP)
        await asyncio.wait_for(watching, DEADLINE_S)
        await asyncio.wait_for(died.wait(), DEADLINE_S)


async def test_the_watch_ends_with_its_engine(tmp_path: Path) -> None:
    async with linked(tmp_path, 60.0) as (link, died):
        watching = asyncio.create_task(link.kill_when_silent(Silence(0.0), lambda: False))
        await asyncio.sleep(0)
        os.kill(link.pid, signal.SIGKILL)
        await asyncio.wait_for(watching, DEADLINE_S)
        assert died.is_set()


def slices(silence: Silence, idle: list[bool]) -> int:
    """How many slices of silence it takes, the last entry of `idle` repeated."""
    for count in range(1, 10_000):
        if silence.is_too_long(idle=idle[min(count, len(idle)) - 1]):
            return count
    return -1


def test_a_busy_engine_has_the_time_of_a_step_and_an_idle_one_has_little() -> None:
    assert slices(Silence(120.0), [False]) == 125
    assert slices(Silence(0.0), [False]) == -1, "a step may take any time"
    assert slices(Silence(120.0), [True]) == slices(Silence(0.0), [True]) == 30


def test_a_step_whose_request_was_cancelled_is_not_held_against_the_engine() -> None:
    assert slices(Silence(120.0), [False] * 60 + [True]) == 90, "idle time counts from then on"
    assert slices(Silence(120.0), [True] * 20 + [False] * 10 + [True]) == 60
    silence = Silence(120.0)
    assert not silence.is_too_long(idle=True)
    silence.answered()
    assert slices(silence, [True]) == 30

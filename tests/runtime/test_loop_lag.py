"""A blocked event loop is reported, as a number and in the log."""

import asyncio
import time

import pytest

from trunkline_runtime.loop_lag import INTERVAL_S, NOTABLE_S, PART_S, RECENT_S, LoopLag


async def a_look(lag: LoopLag) -> float:
    """Waits until the watch has run."""
    await asyncio.sleep(2 * INTERVAL_S)
    return lag.recent_s()


async def test_a_step_that_computes_is_measured() -> None:
    async with LoopLag().watching() as lag:
        await asyncio.sleep(0)  # the watch starts
        time.sleep(0.1)  # noqa: ASYNC251  # this is the step
        assert await a_look(lag) >= 0.1 - INTERVAL_S


def test_every_reader_sees_the_longest_lag_of_the_last_minute() -> None:
    now_s = 1000.0
    lag = LoopLag(lambda: now_s)
    assert lag.recent_s() == 0.0
    lag.note(0.4)
    lag.note(0.2)
    now_s += RECENT_S / 2
    lag.note(0.1)
    assert [lag.recent_s(), lag.recent_s()] == [0.4, 0.4]
    now_s += RECENT_S / 2
    assert lag.recent_s() == 0.4
    now_s += PART_S
    assert lag.recent_s() == 0.1
    now_s += 10 * RECENT_S
    assert lag.recent_s() == 0.0


async def test_a_long_step_stands_in_the_log(capsys: pytest.CaptureFixture[str]) -> None:
    async with LoopLag().watching() as lag:
        await asyncio.sleep(0)
        time.sleep(NOTABLE_S + 2 * INTERVAL_S)  # noqa: ASYNC251
        await a_look(lag)
    assert "event loop held up" in "".join(capsys.readouterr())

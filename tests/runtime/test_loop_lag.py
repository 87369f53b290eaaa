"""A blocked event loop is reported, as a number and in the log."""

import asyncio
import time

import pytest

from trunkline_runtime.loop_lag import INTERVAL_S, NOTABLE_S, LoopLag


async def a_look(lag: LoopLag) -> float:
    """Waits until the watch has run."""
    await asyncio.sleep(2 * INTERVAL_S)
    return lag.take()


async def test_a_step_that_computes_is_measured_once() -> None:
    async with LoopLag().watching() as lag:
        await asyncio.sleep(0)  # the watch starts
        time.sleep(0.1)  # noqa: ASYNC251  # this is the step
        assert await a_look(lag) >= 0.1 - INTERVAL_S
        assert lag.take() == 0.0


async def test_a_long_step_stands_in_the_log(capsys: pytest.CaptureFixture[str]) -> None:
    async with LoopLag().watching() as lag:
        await asyncio.sleep(0)
        time.sleep(NOTABLE_S + 2 * INTERVAL_S)  # noqa: ASYNC251
        await a_look(lag)
    assert "event loop held up" in "".join(capsys.readouterr())

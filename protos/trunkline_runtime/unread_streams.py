"""Ends a gRPC stream whose client does not read it."""

import asyncio
import gc
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from trunkline_runtime.log import get_logger

UNREAD_S = 60.0  # as over HTTP
SPREAD = 0.1  # of the time: calls that wait since the same moment end one after the other, over so much more of it
# The coroutine of grpc.aio that waits for a call's end, whatever became of the call's own task.
HOLDER = "_schedule_rpc_coro"


@contextmanager
def ended_if_unread(method: str, within_s: float) -> Iterator[None]:
    """Ends the current call unless the context is left in time, or up to a tenth later. A servicer that yields a
    response within it resumes once gRPC has sent the response, for which the client's window must have room."""
    task = asyncio.current_task()
    assert task is not None, "a servicer runs in a task"
    ends_after_s = spread_s(within_s, random.random())

    def end() -> None:
        get_logger().info("a client that does not read is dropped", method=method, after_s=round(ends_after_s, 1))
        reset_call(task)

    timer = asyncio.get_running_loop().call_later(ends_after_s, end)
    try:
        yield
    finally:
        timer.cancel()


def spread_s(within_s: float, share: float) -> float:
    """Returns how long one call may wait. To end it blocks the event loop for milliseconds, so calls differ.

    share: a random number from 0 to 1
    """
    return within_s * (1.0 + SPREAD * share)


def reset_call(task: "asyncio.Task[Any]") -> None:
    """Ends a call without a status, which would wait for the client, too. grpc.aio has no function for that.

    gRPC's core resets the stream when nothing refers to the call any more: neither its own task nor the one in which
    grpc.aio waits for its end. That one is found by what it refers to, among all tasks of the loop. That blocks the
    loop for about a microsecond for each open call: 3 ms with 3,000 calls.
    """
    task.cancel()
    holder = _holder_of(task)
    if holder is None:
        get_logger().warning("a call that is not read stays open until its connection ends: grpc.aio has changed")
    else:
        holder.cancel()


def _holder_of(task: "asyncio.Task[Any]") -> "asyncio.Task[Any] | None":
    for other in asyncio.all_tasks():
        coroutine = other.get_coro()
        if getattr(coroutine, "__name__", "") == HOLDER and any(
            found is task for found in gc.get_referents(*gc.get_referents(coroutine))
        ):
            return other
    return None

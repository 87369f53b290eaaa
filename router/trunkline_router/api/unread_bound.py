"""Ends a gRPC stream whose client does not read it."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from trunkline_runtime.log import get_logger

UNREAD_S = 60.0  # as over HTTP


@contextmanager
def ended_if_unread(method: str, within_s: float) -> Iterator[None]:
    """Ends the current call unless the context is left in time. A servicer that yields a response within it
    resumes once gRPC has sent the response, for which the client's window must have room.

    The call's task is cancelled without a status: a status would wait for the client, too. gRPC then resets the stream.
    """
    task = asyncio.current_task()
    assert task is not None, "a servicer runs in a task"

    def end() -> None:
        get_logger().info("a client that reads nothing is dropped", method=method, after_s=within_s)
        task.cancel()

    timer = asyncio.get_running_loop().call_later(within_s, end)
    try:
        yield
    finally:
        timer.cancel()

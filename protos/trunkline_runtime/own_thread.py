"""Runs a call that may hang in a thread of its own, which does not delay the end of the process as asyncio's would."""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar, cast

Result = TypeVar("Result")


def in_own_thread(call: Callable[[], Result], name: str) -> "asyncio.Future[Result]":
    """Starts the call in a thread of this name, and returns what becomes of it."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Result] = loop.create_future()

    def settle(result: Result | None, error: Exception | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
            future.exception()  # marks it as retrieved, because the caller may have stopped waiting
        else:
            future.set_result(cast(Result, result))

    def run() -> None:
        try:
            outcome: tuple[Result | None, Exception | None] = call(), None
        except Exception as error:  # handed to the caller
            outcome = None, error
        with contextlib.suppress(RuntimeError):  # the loop is closed: the router has stopped
            loop.call_soon_threadsafe(settle, *outcome)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future

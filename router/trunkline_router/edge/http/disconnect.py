"""Ends the work for a client that has gone."""

import asyncio
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

# In an ASGI scope's `extensions`: a function that sets what is called once if the client goes. Waiting for
# `http.disconnect` instead would need a second task for each request.
ON_DISCONNECT = "trunkline.on_disconnect"

Scope = MutableMapping[str, Any]


class ClientGone(Exception):
    """The client closed its connection before the response was complete. There is nothing left to send."""


@contextmanager
def ends_with_client(scope: Scope) -> Iterator[None]:
    """Cancels what the current task does inside as soon as the client goes, and then raises ClientGone.

    Use it once the request's body has been read. Raises ClientGone immediately if the client has gone already.
    """
    task = asyncio.current_task()
    assert task is not None
    on_disconnect: Callable[[Callable[[], None] | None], bool] = scope["extensions"][ON_DISCONNECT]
    is_gone = False

    def cancel() -> None:
        nonlocal is_gone
        is_gone = True
        task.cancel()

    if not on_disconnect(cancel):
        raise ClientGone
    try:
        yield
    except asyncio.CancelledError:
        # Another cancellation, such as the server's stop, goes on as it is.
        if is_gone and task.uncancel() == 0:
            raise ClientGone from None
        raise
    finally:
        on_disconnect(None)
    if is_gone:  # the cancellation has not been delivered: nothing inside awaited since
        task.uncancel()
        raise ClientGone

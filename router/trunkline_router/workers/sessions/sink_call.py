"""Calls what takes a choice's outputs. If that fails, only its request is affected."""

from collections.abc import Callable

from trunkline_runtime.log import get_logger


def deliver(sink: Callable[..., object], *arguments: object) -> bool | None:
    """Calls a sink. Returns whether it accepted; None if it raised: a bug with one request must not end the session."""
    try:
        return sink(*arguments) is not False
    except Exception as error:
        log_bug(error)
        return None


def log_bug(error: Exception) -> None:
    get_logger().error("unexpected error", exc_info=error)

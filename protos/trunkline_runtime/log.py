"""Structured logs on standard error: readable text on a terminal, JSON lines otherwise. They never contain prompt or
output text."""

import json
import logging
import sys
import traceback
from collections.abc import Iterator, Mapping, MutableMapping
from contextvars import ContextVar
from typing import Any, Protocol, TextIO

import orjson
import structlog
from structlog.typing import Processor

from trunkline_runtime.log_writer import LogWriter

STANDARD_ERROR = 2  # the file descriptor


class LogContext(Protocol):
    """What a task works for, for example a request."""

    def log_fields(self) -> Mapping[str, Any]:
        """The fields that lines of the task have, unless the line sets them itself."""
        ...


log_context: ContextVar[LogContext | None] = ContextVar("log_context", default=None)


def configure_logging(service: str, **bound: Any) -> None:
    """Configures the process's logs; every line has `service` and `bound`, whichever thread writes it.

    All that Python code prints to sys.stderr goes the same way: warnings, tracebacks, lines of other libraries.
    """
    terminal = _WRITER.isatty()
    _WRITER.start()
    sys.stderr = _STREAM
    structlog.configure(
        processors=[
            _bind({"service": service, **bound}),
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            _add_context,
            structlog.processors.StackInfoRenderer(),
            *([] if terminal else [structlog.processors.ExceptionRenderer(_stack)]),
            structlog.dev.ConsoleRenderer(exception_formatter=_write_stack)
            if terminal
            else structlog.processors.JSONRenderer(_to_json),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=_LineLogger,
        cache_logger_on_first_use=True,
    )


def get_logger() -> structlog.typing.FilteringBoundLogger:
    logger: structlog.typing.FilteringBoundLogger = structlog.get_logger()
    return logger


class _LineLogger:
    """What structlog hands finished lines to. Without a lock, unlike structlog's own: a destructor may log too."""

    def __init__(self, *_: Any) -> None: ...

    def msg(self, line: str) -> None:
        _STREAM.write(line + "\n")

    log = debug = info = warning = error = critical = exception = msg


def num_dropped_lines() -> int:
    """Returns how many lines of this process could not be written."""
    return _WRITER.num_dropped


def stack_of(error: BaseException) -> str:
    """Returns where an exception and its causes were raised, first cause first, and their types.

    Messages and local variables are left out: those of other libraries quote prompts.
    """
    return "\n".join(_parts(error))


def _parts(error: BaseException) -> Iterator[str]:
    earlier = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if earlier is not None:
        yield from _parts(earlier)
        yield "after which came:"
    for inner in error.exceptions if isinstance(error, BaseExceptionGroup) else ():
        yield from _parts(inner)
        yield "in:"
    yield from (line.rstrip("\n") for line in traceback.format_tb(error.__traceback__))
    kind = f"{type(error).__module__}.{type(error).__qualname__}"
    yield f"{kind} [errno {error.errno}]" if isinstance(error, OSError) and error.errno else kind


def _stack(exc_info: structlog.typing.ExcInfo) -> str:
    return stack_of(exc_info[1])


def _write_stack(out: TextIO, exc_info: structlog.typing.ExcInfo) -> None:
    out.write("\n" + _stack(exc_info))


def _bind(fields: Mapping[str, Any]) -> Processor:
    """Adds these fields to all lines of the process, whatever thread or task writes them."""

    def add(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        for name, value in fields.items():
            event.setdefault(name, value)
        return event

    return add


def _to_json(event: Any, **_: Any) -> str:
    try:
        return orjson.dumps(event, default=repr).decode()
    except TypeError:  # an integer of more than 64 bits, or text that is no Unicode
        return json.dumps(event, default=repr)


def _add_context(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    context = log_context.get()
    if context is not None:
        for name, value in context.log_fields().items():
            event.setdefault(name, value)
    return event


def _tell_dropped(num_lines: int) -> None:
    get_logger().warning("log lines could not be written and were dropped", lines=num_lines)


_WRITER = LogWriter(STANDARD_ERROR, _tell_dropped)
_STREAM = _WRITER.text()

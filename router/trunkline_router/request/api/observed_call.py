"""One observed request: how it ended, whatever ended it."""

import asyncio
from contextvars import Token
from types import TracebackType

from trunkline.status import INTERNAL, RequestRefused, deadline_exceeded, internal
from trunkline_router.record.request_observer import RequestObserver, note_refusal
from trunkline_router.request.request_call import RequestCall
from trunkline_runtime.log import LogContext, get_logger
from trunkline_runtime.tracing import trace_context_of


class ObservedCall:
    """A context that keeps the request's record until it closes. An unexpected error becomes RequestRefused (INTERNAL).

    A class, not a generator: it is entered for each request, and costs a third.
    """

    __slots__ = ("_begun", "_call", "_observer")

    def __init__(self, observer: RequestObserver, call: RequestCall) -> None:
        self._observer = observer
        self._call = call
        self._begun: Token[LogContext | None] | None = None

    def __enter__(self) -> None:
        call = self._call
        call.record.tenant = call.caller.tenant
        self._begun = self._observer.begin(call.record, *trace_context_of(call.metadata))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._begun is not None
        try:
            if error is not None:
                self._note(error)
        finally:
            self._observer.end(self._call.record, self._begun)

    def _note(self, error: BaseException) -> None:
        """Notes why the request ended. Raises RequestRefused in place of an error that clients must not see."""
        record, request_id = self._call.record, self._call.request_id
        if isinstance(error, RequestRefused):
            note_refusal(record, error)
            if error.reason == INTERNAL and request_id not in error.message:  # a worker's
                raise internal(request_id) from None
        elif isinstance(error, asyncio.CancelledError | GeneratorExit):
            remaining_s = self._call.time_left()
            if remaining_s is not None and remaining_s <= 0:
                note_refusal(record, deadline_exceeded())
        elif isinstance(error, Exception):
            get_logger().error("unexpected error", **record.log_fields(), exc_info=error)
            hidden = internal(request_id)
            note_refusal(record, hidden)
            raise hidden from None

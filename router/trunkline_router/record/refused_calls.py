"""Calls that were refused before they became requests: counted, logged, and traced if their clients trace them.

Anyone can send such calls, so a flood of them costs a counter and a bounded number of lines and spans.
"""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trunkline_router.address import network_of
from trunkline_router.record.rate_limits import BudgetLimits, FairBudget
from trunkline_runtime.log import get_logger
from trunkline_runtime.telemetry.trace_context import trace_context

# Lines, by account: each takes some 50 µs of the event loop.
LINE_LIMITS = BudgetLimits(per_s=10.0, at_once=100.0, reserve=50.0, account_per_s=1.0, account_at_once=10.0)
KNOWN_METHODS = frozenset({"CONNECT", "DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT", "TRACE"})


@dataclass(frozen=True, slots=True)
class RefusedCall:
    """A call and why it was refused. It never holds content: no body, query, credential, or path that no endpoint has.

    protocol: GRPC or HTTP, of request_record.py
    reason: of the error table, in capitals; of an error of HTTP itself its code, in lower case
    status: of HTTP; over gRPC the code's number
    request_id: that the response has; "" over gRPC
    method: of HTTP, as far as it is known
    route: the template of the endpoint's path, or the RPC's full name; "" if there is no such endpoint
    host: the client's
    tenant: "" if it is not known
    field: the refused field of the request, as far as its names are the API's own; "" if there is none
    started_s: on the monotonic clock; None: not known
    """

    protocol: str
    reason: str
    status: int
    request_id: str = ""
    method: str = ""
    route: str = ""
    url_scheme: str = ""
    host: str = ""
    tenant: str = ""
    field: str = ""
    traceparent: str = ""
    tracestate: str = ""
    started_s: float | None = None

    @property
    def account(self) -> str:
        """The sender for which the call counts: its tenant, or the client's network if the tenant is not known."""
        return f"tenant {self.tenant}" if self.tenant else network_of(self.host)

    def log_fields(self) -> dict[str, Any]:
        """The fields of its line in the log. What is not known is left out."""
        trace = trace_context(self.traceparent)
        fields = {
            "request_id": self.request_id,
            "trace_id": "" if trace is None else f"{trace.trace_id:032x}",
            "protocol": self.protocol,
            "method": self.method if self.method in KNOWN_METHODS else "",  # others are a client's own words
            "route": self.route,
            "client": self.host,
            "tenant": self.tenant,
            "field": self.field,
        }
        known: dict[str, Any] = {name: value for name, value in fields.items() if value}
        return known | {"status": self.status, "reason": self.reason}


class RefusedCalls:
    """All refused calls of a process.

    listener: is told of them, too. It must be quick, and bound what it does
    limits: how many lines, by account
    """

    def __init__(
        self,
        listener: Callable[[RefusedCall], None] | None = None,
        *,
        clock_s: Callable[[], float] = time.monotonic,
        limits: BudgetLimits = LINE_LIMITS,
    ) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()  # by protocol and reason
        self._listener = listener
        self._clock_s = clock_s
        self._lines = FairBudget(limits, clock_s())
        self._num_unlogged = 0  # since the last line

    def note(self, call: RefusedCall) -> None:
        """Counts a refused call, and tells of it."""
        self.counts[call.protocol, call.reason] += 1
        if self._lines.takes(call.account, self._clock_s()):
            unlogged = {"unlogged": self._num_unlogged} if self._num_unlogged else {}
            self._num_unlogged = 0
            get_logger().info("call refused", **call.log_fields(), **unlogged)
        else:
            self._num_unlogged += 1
        if self._listener is not None:
            self._listener(call)

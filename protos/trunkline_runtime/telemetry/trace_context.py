"""W3C trace context: which trace a request belongs to, and which span called.

https://www.w3.org/TR/trace-context/
"""

import re
from random import Random
from typing import NamedTuple

from opentelemetry.trace import TraceState

MAX_TRACESTATE = 512  # characters: what the specification asks servers to pass on
SAMPLED = 0x01

_TRACEPARENT = re.compile(r"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_RANDOM = Random()  # ids need not be secret


class TraceContext(NamedTuple):
    """A span as other processes name it.

    is_sampled: whether the processes of the trace export their spans
    tracestate: what tracing systems add for themselves; "": nothing
    """

    trace_id: int  # 128 bits
    span_id: int  # 64 bits
    is_sampled: bool
    tracestate: str = ""

    @property
    def traceparent(self) -> str:
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{self.is_sampled:02x}"


def trace_context(traceparent: str, tracestate: str = "") -> TraceContext | None:
    """Parses the context of a caller's span; None if there is none, or if it makes no sense. An invalid tracestate is
    left out."""
    found = _TRACEPARENT.fullmatch(traceparent.strip(" \t")) if traceparent else None
    if found is None or (found[1] == "00" and found[5]):
        return None
    return TraceContext(int(found[2], 16), int(found[3], 16), bool(int(found[4], 16) & SAMPLED), _state(tracestate))


def new_trace_id() -> int:
    return _RANDOM.getrandbits(128) or new_trace_id()


def new_span_id() -> int:
    return _RANDOM.getrandbits(64) or new_span_id()


def _state(tracestate: str) -> str:
    if not tracestate or len(tracestate) > MAX_TRACESTATE:
        return ""
    return TraceState.from_header([tracestate]).to_header()

"""Which trace a request belongs to and which span called (W3C trace context), and whether the trace is exported, as
OTEL_TRACES_SAMPLER says.

https://www.w3.org/TR/trace-context/
https://opentelemetry.io/docs/specs/otel/configuration/sdk-environment-variables/
"""

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import blake2b
from secrets import token_bytes
from typing import NamedTuple

from opentelemetry.trace import TraceState

from trunkline_runtime.telemetry.otel_variables import VariableError, one_of

MAX_TRACESTATE = 512  # characters: what the specification asks servers to pass on
SAMPLED = 0x01

_TRACEPARENT = re.compile(r"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_DRAWN_AT_ONCE = 256  # ids: a system call for each one would take a thirtieth of a short request's time


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


def trace_context_of(metadata: Iterable[tuple[str, str | bytes]] | None) -> tuple[str, str]:
    """(traceparent, tracestate) in gRPC metadata; empty strings if absent."""
    found = {
        key: value for key, value in metadata or () if key in ("traceparent", "tracestate") and isinstance(value, str)
    }
    return found.get("traceparent", ""), found.get("tracestate", "")


def new_trace_id() -> int:
    return random_int(128) or new_trace_id()


def new_span_id() -> int:
    return random_int(64) or new_span_id()


def new_request_id() -> str:
    """32 hexadecimal digits."""
    return f"{random_int(128):032x}"


_unused: list[bytes] = []  # random bytes, 16 each


def random_int(num_bits: int) -> int:
    """A number of up to 128 random bits, which cannot be predicted. May be called on any thread."""
    try:
        taken = _unused.pop()
    except IndexError:
        drawn = os.urandom(16 * _DRAWN_AT_ONCE)
        _unused.extend(drawn[at : at + 16] for at in range(16, len(drawn), 16))
        taken = drawn[:16]
    return int.from_bytes(taken) >> (128 - num_bits)


def _state(tracestate: str) -> str:
    if not tracestate or len(tracestate) > MAX_TRACESTATE:
        return ""
    return TraceState.from_header([tracestate]).to_header()


SAMPLER, RATIO = "OTEL_TRACES_SAMPLER", "OTEL_TRACES_SAMPLER_ARG"
PARENT_BASED = "parentbased_"
ALWAYS_ON, ALWAYS_OFF, BY_RATIO = "always_on", "always_off", "traceidratio"
ROOTS = (ALWAYS_ON, ALWAYS_OFF, BY_RATIO)
DEFAULT = PARENT_BASED + ALWAYS_ON
_RATIO_BITS = 64  # the SDK compares so many bits of a trace id, so that processes of one ratio agree


@dataclass(frozen=True, slots=True)
class HeadSampler:
    """ratio: share of the traces that are sampled. is_parent_based: a caller that has decided already is followed. key:
    secret, for the ids of callers that are not followed"""

    ratio: float = 1.0
    is_parent_based: bool = True
    key: bytes = field(default_factory=lambda: token_bytes(16), repr=False, compare=False)

    def samples(self, trace_id: int, parent: bool | None) -> bool:
        """Whether to sample a trace. `parent`: whether its caller does; None: it begins here.

        All requests of a trace are sampled, or none. A caller that is not followed has chosen the trace's id all the
        same, so its id decides in a way that callers cannot know.
        """
        if parent is not None and self.is_parent_based:
            return parent
        if self.ratio >= 1.0:
            return True
        drawn = trace_id & (1 << _RATIO_BITS) - 1 if parent is None else self._hidden(trace_id)
        return drawn < round(self.ratio * (1 << _RATIO_BITS))

    def _hidden(self, trace_id: int) -> int:
        hashed = blake2b(trace_id.to_bytes(16), digest_size=_RATIO_BITS // 8, key=self.key)
        return int.from_bytes(hashed.digest())


NONE_SAMPLED = HeadSampler(ratio=0.0)  # but for the traces of callers that sample them


def head_sampler() -> HeadSampler:
    """The sampler that the variables ask for. Raises VariableError."""
    name = one_of((*ROOTS, *(PARENT_BASED + root for root in ROOTS)), SAMPLER, DEFAULT)
    root = name.removeprefix(PARENT_BASED)
    given = {ALWAYS_ON: "1.0", ALWAYS_OFF: "0.0"}.get(root) or os.environ.get(RATIO) or "1.0"
    try:
        ratio = float(given)
    except ValueError:
        ratio = -1.0
    if not 0.0 <= ratio <= 1.0:
        raise VariableError(f"{RATIO}={given} is not a ratio; allowed: 0.0 to 1.0")
    return HeadSampler(ratio, is_parent_based=name != root)

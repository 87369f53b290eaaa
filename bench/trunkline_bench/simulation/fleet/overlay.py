"""Scales a trace's load by overlaying copies of it, at other phases and with prompts of their own.

Compressing time instead would shorten the gaps between the turns of a conversation, which decide whether its prefix is
still cached. For a fractional number of copies, whole conversations are left out, never single turns. A larger number
of copies contains all requests of a smaller one.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from math import ceil
from zlib import crc32

from trunkline_bench.simulation.traces.trace_request import TraceRequest

# Multiples of the golden ratio are phases that fill the trace evenly, for any number of copies.
PHASE_STEP = 0.6180339887498949
# Token ids below this are the trace's own; the first tokens of its copies are above.
MOST_TRACE_IDS = 1 << 15
MOST_COPIES = 1 << 17  # times laps: first tokens are 32-bit numbers
KEPT_PROMPTS = 2_000  # tokens of traces with at most so many requests are made once for all copies


class TooManyCopies(Exception):
    """There are not enough token ids to keep the copies distinct. The message is one line."""


def overlay(trace: list[TraceRequest], copies: float, duration_s: float, ramp_s: float = 0.0) -> list[TraceRequest]:
    """Requests that arrive in [0, duration_s), in order. `trace` must not be empty; it repeats in laps.

    copies: multiple of the trace's own load; may be fractional
    ramp_s: copies start one after another until this time, as for a fleet with empty caches
    Raises TooManyCopies.
    """
    lap_s = lap_of(trace)
    laps = ceil(duration_s / lap_s) + 1
    if ceil(copies) * laps >= MOST_COPIES:
        raise TooManyCopies(f"{copies:g} copies of {laps} laps each are too many; allowed: {MOST_COPIES:,} in all")
    prompts = [request.prompt for request in trace]
    if len(trace) <= KEPT_PROMPTS:
        prompts = [lru_cache(maxsize=1)(prompt) for prompt in prompts]
    laid: list[TraceRequest] = []
    for copy in range(ceil(copies)):
        share = min(1.0, copies - copy)
        begin_s = ramp_s * copy / copies
        phase_s = copy * PHASE_STEP % 1.0 * lap_s
        for index, request in enumerate(trace):
            for lap in range(laps):
                arrival_s = request.arrival_s + lap * lap_s - phase_s
                if not begin_s <= arrival_s < duration_s:
                    continue
                conversation = f"{copy}/{lap}/{request.conversation or f'alone {index}'}"
                if _kept(conversation, share):
                    prompt = partial(_own, prompts[index], copy * laps + lap)
                    changed = replace(request, arrival_s=arrival_s, prompt=prompt, conversation=conversation)
                    laid.append(changed)
    laid.sort(key=lambda request: request.arrival_s)
    return laid


def lap_of(trace: list[TraceRequest]) -> float:
    """The time after which a trace repeats: one mean gap after its last request."""
    span_s = trace[-1].arrival_s - trace[0].arrival_s
    return span_s * len(trace) / (len(trace) - 1) if span_s > 0 else 1.0


def _kept(conversation: str, share: float) -> bool:
    return share >= 1.0 or crc32(conversation.encode()) < share * (1 << 32)


def _own(prompt: Callable[[], list[int]], number: int) -> list[int]:
    """The prompt with a first token of this copy's own, so that it shares no prefix with other copies."""
    tokens = prompt().copy()
    tokens[0] += MOST_TRACE_IDS * number
    return tokens

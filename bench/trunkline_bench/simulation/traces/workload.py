"""Workloads: requests with their times, read from traces or made up.

Three formats, told apart by content: Mooncake's JSON lines (mooncake_trace.py), Azure's CSV (azure_trace.py), and JSON
lines with text (text_trace.py). The JSON formats may name a `lane` and a `tenant` on each line.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np

from trunkline_bench.simulation.traces.trace_lines import (
    InvalidLine,
    InvalidLineError,
    SkippedLines,
    TraceError,
    filled_lines,
    json_object,
    text_of,
)
from trunkline_bench.simulation.traces.trace_request import FIRST_ID, TraceRequest, random_prompt
from trunkline_bench.simulation.traces import azure_trace, mooncake_trace, text_trace

LEAST_SPAN_S = 1e-6  # of a workload's arrivals: what came within less came at once


@dataclass(frozen=True, slots=True)
class TraceFormat:
    """How a file's lines become requests. `request_of` takes a line's number, its text and the size of the vocabulary,
    and raises InvalidLine; `arrange` takes the requests in order of their times."""

    request_of: Callable[[int, str, int], TraceRequest]
    arrange: Callable[[list[TraceRequest]], list[TraceRequest]] = list
    header: int = 0  # number of the line with the columns' names; 0: there is none


def read_trace(
    path: Path, *, vocab_size: int = 32_000, limit: int | None = None, skipped: SkippedLines | None = None
) -> list[TraceRequest]:
    """A trace in order of arrival, whatever the order of its lines; at least one request and at most the first `limit`.

    A line that is no request is refused with the whole trace, or where there is `skipped`, left out and counted there.
    A request that is too long for a worker is none of these: the worker refuses it. Raises TraceError, of a line
    InvalidLineError.
    """
    form = _format_of(path, skipped)

    def requests() -> Iterable[TraceRequest]:
        for number, line in filled_lines(path):
            if number == form.header:
                continue
            try:
                yield form.request_of(number, text_of(line), vocab_size)
            except InvalidLine as problem:
                if skipped is None:
                    raise InvalidLineError(f"{path}:{number}: {problem}") from None
                skipped.add(number, problem)

    found = sorted(islice(requests(), limit), key=lambda request: request.arrival_s)
    if not found:
        raise TraceError(f"{path}: no requests{f'; {skipped}' if skipped is not None and skipped.count else ''}")
    arranged = form.arrange(found)
    first_s = arranged[0].arrival_s
    return [replace(request, arrival_s=request.arrival_s - first_s) for request in arranged]


def _format_of(path: Path, skipped: SkippedLines | None) -> TraceFormat:
    """What the first line shows that is not blank or, where lines may be `skipped`, the first one that shows anything.
    Raises TraceError."""
    first: InvalidLineError | None = None
    for number, line in filled_lines(path):
        try:
            return _format_by(number, text_of(line))
        except InvalidLine as problem:
            first = first or InvalidLineError(f"{path}:{number}: {problem}")
        if skipped is None:
            break
    if first is not None and skipped is not None:
        raise TraceError(f"none of the trace's lines is a request; the first: {first}")
    raise first or TraceError(f"{path}: the file is empty")


def _format_by(number: int, line: str) -> TraceFormat:
    """What one line shows: the columns' names, or a whole request, since half of one may look like another format.
    Raises InvalidLine."""
    if azure_trace.is_header(line):
        return TraceFormat(azure_trace.request_of, header=number)
    if not line.lstrip().startswith("{"):
        raise InvalidLine(f"neither JSON lines nor a CSV with {', '.join(azure_trace.COLUMNS)}")
    form = TraceFormat(text_trace.request_of)
    if "hash_ids" in json_object(line):
        form = TraceFormat(mooncake_trace.request_of, mooncake_trace.spread)
    form.request_of(number, line, FIRST_ID + 1)
    return form


# Made-up and changed workloads


def at_once(requests: Iterable[TraceRequest]) -> list[TraceRequest]:
    """The same requests, all there from the start."""
    return [replace(request, arrival_s=0.0) for request in requests]


def at_rate(requests: list[TraceRequest], requests_per_s: float) -> list[TraceRequest]:
    """The same requests in the same rhythm, faster or slower; the first one arrives at once."""
    first_s = requests[0].arrival_s
    span_s = max(requests[-1].arrival_s - first_s, LEAST_SPAN_S)
    factor = len(requests) / requests_per_s / span_s
    return [replace(request, arrival_s=(request.arrival_s - first_s) * factor) for request in requests]


def window(requests: list[TraceRequest], start_s: float, end_s: float) -> list[TraceRequest]:
    """Those that arrive in [start_s, end_s), counted from start_s."""
    kept = [request for request in requests if start_s <= request.arrival_s < end_s]
    return [replace(request, arrival_s=request.arrival_s - start_s) for request in kept]


def poisson(
    count: int,
    requests_per_s: float,
    lengths: Callable[[np.random.Generator], tuple[int, int]],
    *,
    seed: int = 0,
    lane: str = "standard",
    tenant: str = "",
    vocab_size: int = 32_000,
) -> list[TraceRequest]:
    """Requests that arrive independently of one another. lengths: draws (prompt tokens, output tokens)."""
    draw = np.random.Generator(np.random.PCG64(seed))
    arrivals = np.cumsum(draw.exponential(1 / requests_per_s, count)).tolist()
    requests: list[TraceRequest] = []
    for index, arrival_s in enumerate(arrivals):
        prompt, output = lengths(draw)
        make = partial(random_prompt, (seed + 1) * 1_000_003 + index, prompt, vocab_size)
        requests.append(TraceRequest(arrival_s, prompt, output, make, lane, tenant))
    return requests


def mixed_lengths(draw: np.random.Generator) -> tuple[int, int]:
    """Chat, questions about documents, and long writing, in one workload: 70, 20 and 10 %."""
    kind = draw.random()
    if kind < 0.7:
        return int(draw.integers(64, 513)), int(draw.integers(32, 257))
    if kind < 0.9:
        return int(draw.integers(2048, 8193)), int(draw.integers(64, 513))
    return int(draw.integers(64, 513)), int(draw.integers(1024, 2049))

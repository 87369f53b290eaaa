"""Workloads: requests with arrival times, read from traces or generated.

Three formats are recognised by content: Mooncake's JSON lines (mooncake_trace.py), Azure's CSV (azure_trace.py), and
JSON lines with text (text_trace.py). Lines of the JSON formats may have a `lane` and a `tenant`.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np

from trunkline_bench.simulation.traces import azure_trace, mooncake_trace, text_trace
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

LEAST_SPAN_S = 1e-6  # of a workload's arrivals; avoids a division by zero if all came at once


@dataclass(frozen=True, slots=True)
class TraceFormat:
    """How lines become requests. `request_of` takes a line's number, its text and the vocabulary size, and raises
    InvalidLine; `arrange` takes the requests in order of time."""

    request_of: Callable[[int, str, int], TraceRequest]
    arrange: Callable[[list[TraceRequest]], list[TraceRequest]] = list
    header: int = 0  # number of the line with the column names; 0: none


def read_trace(
    path: Path, *, vocab_size: int = 32_000, limit: int | None = None, skipped: SkippedLines | None = None
) -> list[TraceRequest]:
    """The requests of a trace in order of arrival, at least one and at most the first `limit` of the file.

    Raises TraceError if the trace cannot be read, and InvalidLineError if a line is not a request. With `skipped`, such
    lines are left out and counted there. Requests that are too long for a worker are kept: the worker refuses them.
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
    """The format of the first line that is not blank, or if lines may be skipped, of the first valid line.

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
    """The format of one line: column names, or a whole request, since a part of one may look like another format.

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


# Generated and changed workloads


def at_once(requests: Iterable[TraceRequest]) -> list[TraceRequest]:
    """The same requests, all arriving at the start."""
    return [replace(request, arrival_s=0.0) for request in requests]


def at_rate(requests: list[TraceRequest], requests_per_s: float) -> list[TraceRequest]:
    """The same requests with all gaps scaled to this rate; the first one arrives at time 0."""
    first_s = requests[0].arrival_s
    span_s = max(requests[-1].arrival_s - first_s, LEAST_SPAN_S)
    factor = len(requests) / requests_per_s / span_s
    return [replace(request, arrival_s=(request.arrival_s - first_s) * factor) for request in requests]


def window(requests: list[TraceRequest], start_s: float, end_s: float) -> list[TraceRequest]:
    """The requests that arrive in [start_s, end_s), with times relative to start_s."""
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
    """`count` requests with Poisson arrivals. lengths: draws (prompt tokens, output tokens)."""
    draw = np.random.Generator(np.random.PCG64(seed))
    arrivals = np.cumsum(draw.exponential(1 / requests_per_s, count)).tolist()
    requests: list[TraceRequest] = []
    for index, arrival_s in enumerate(arrivals):
        prompt, output = lengths(draw)
        make = partial(random_prompt, (seed + 1) * 1_000_003 + index, prompt, vocab_size)
        requests.append(TraceRequest(arrival_s, prompt, output, make, lane, tenant))
    return requests


def mixed_lengths(draw: np.random.Generator) -> tuple[int, int]:
    """Lengths of a mixed workload: 70 % chat, 20 % questions about documents, 10 % long outputs."""
    kind = draw.random()
    if kind < 0.7:
        return int(draw.integers(64, 513)), int(draw.integers(32, 257))
    if kind < 0.9:
        return int(draw.integers(2048, 8193)), int(draw.integers(64, 513))
    return int(draw.integers(64, 513)), int(draw.integers(1024, 2049))

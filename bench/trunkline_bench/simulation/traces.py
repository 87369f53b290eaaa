"""Workloads: requests with their times, read from traces or made up.

Three formats, told apart by content: Mooncake's JSON lines (mooncake_trace.py), Azure's CSV, and JSON lines with text
(text_trace.py). The JSON formats may name a `lane` and a `tenant` on each line.
"""

import csv
import gzip
import json
import math
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np

LANES = ("interactive", "standard", "batch")
AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
FIRST_ID = 3  # token ids below are special


class TraceError(Exception):
    """A trace cannot be read. One line: the file, the line, and what is wrong."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request. `prompt` makes its tokens when they are needed: a long trace has more than fit in memory."""

    arrival_s: float  # since the first request of the trace
    prompt_tokens: int
    output_tokens: int
    prompt: Callable[[], list[int]]
    lane: str = "standard"
    tenant: str = ""


def read_trace(path: Path, *, vocab_size: int = 32_000, limit: int | None = None) -> list[TraceRequest]:
    """A trace in order of arrival; at most the first `limit` requests. Raises TraceError."""
    from trunkline_bench.simulation import mooncake_trace, text_trace

    requests: list[TraceRequest]
    _, first = next(numbered_lines(path), (1, ""))
    if not first.strip():
        raise TraceError(f"{path}: the file is empty")
    if first.strip().split(",")[: len(AZURE_COLUMNS)] == list(AZURE_COLUMNS):
        requests = _read_azure(path, vocab_size, limit)
    elif first.lstrip().startswith("{"):
        is_mooncake = "hash_ids" in json_line(path, 1, first)
        requests = (mooncake_trace if is_mooncake else text_trace).read(path, vocab_size, limit)
    else:
        raise TraceError(f"{path}:1: neither JSON lines nor a CSV with {', '.join(AZURE_COLUMNS)}")
    requests.sort(key=lambda request: request.arrival_s)
    first_s = requests[0].arrival_s
    return [replace(request, arrival_s=request.arrival_s - first_s) for request in requests]


def open_bytes(path: Path) -> BinaryIO:
    """A file, compressed or not. Raises TraceError."""
    try:
        return cast(BinaryIO, gzip.open(path)) if path.suffix == ".gz" else path.open("rb")
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from None


def numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    """(line number, line). Raises TraceError: what is compressed or encoded wrongly shows only while it is read."""
    number = 0
    with open_bytes(path) as lines:
        try:
            for number, line in enumerate(lines, start=1):
                yield number, line.decode()
        except UnicodeDecodeError as error:
            raise TraceError(f"{path}:{number}: not UTF-8: {error}") from None
        except (OSError, EOFError, zlib.error) as error:
            raise TraceError(f"{path}:{number + 1}: cannot be read: {error}") from None


def json_lines(path: Path, limit: int | None) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, object) of each line that is not empty."""
    for number, line in numbered_lines(path):
        if limit is not None and number > limit:
            return
        if line.strip():
            yield number, json_line(path, number, line)


def json_line(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except ValueError as error:
        raise TraceError(f"{path}:{number}: not JSON: {error}") from None
    if not isinstance(found, dict):
        raise TraceError(f"{path}:{number}: not a JSON object")
    return found


def number_of(path: Path, line: int, entry: dict[str, Any], name: str, least: float) -> float:
    """A field that must be a number of at least `least`."""
    value = entry.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < math.inf:
        what = "is missing" if name not in entry else f"is {value!r}"
        raise TraceError(f"{path}:{line}: {name} {what}; it must be a number of at least {least:g}")
    return value


def whole_number_of(path: Path, line: int, entry: dict[str, Any], name: str, least: int) -> int:
    """A field that must be a whole number of at least `least`."""
    value = number_of(path, line, entry, name, least)
    if value != int(value):
        raise TraceError(f"{path}:{line}: {name} is {value!r}; it must be a whole number")
    return int(value)


def lane_and_tenant(path: Path, line: int, entry: dict[str, Any]) -> tuple[str, str]:
    lane, tenant = entry.get("lane", "standard"), entry.get("tenant", "")
    if lane not in LANES:
        raise TraceError(f"{path}:{line}: lane is {lane!r}; it must be one of {', '.join(LANES)}")
    if not isinstance(tenant, str):
        raise TraceError(f"{path}:{line}: tenant is {tenant!r}; it must be text")
    return lane, tenant


def random_prompt(seed: int, count: int, vocab_size: int) -> list[int]:
    """Tokens that no other seed's prompt begins with."""
    draw = np.random.Generator(np.random.PCG64(seed))
    tokens: list[int] = draw.integers(FIRST_ID, vocab_size, count).tolist()
    return tokens


def _read_azure(path: Path, vocab_size: int, limit: int | None) -> list[TraceRequest]:
    """Azure LLM inference trace 2023: time, prompt tokens, output tokens. Prompts share nothing."""
    requests: list[TraceRequest] = []
    rows = csv.DictReader(line for _, line in numbered_lines(path))
    for number, row in enumerate(rows, start=2):
        if limit is not None and len(requests) == limit:
            break
        values: dict[str, Any] = {}
        try:
            # Seven digits of a second's fraction: one more than datetime takes.
            values["time"] = datetime.fromisoformat((row["TIMESTAMP"] or "")[:26]).timestamp()
        except ValueError:
            raise TraceError(f"{path}:{number}: TIMESTAMP is {row['TIMESTAMP']!r}, which is no time") from None
        for name in AZURE_COLUMNS[1:]:
            try:
                values[name] = int(row[name] or "")
            except ValueError:
                raise TraceError(f"{path}:{number}: {name} is {row[name]!r}, which is no whole number") from None
            number_of(path, number, values, name, 1)
        tokens = values["ContextTokens"]
        prompt = partial(random_prompt, number, tokens, vocab_size)
        requests.append(TraceRequest(values["time"], tokens, values["GeneratedTokens"], prompt))
    if not requests:
        raise TraceError(f"{path}: no requests")
    return requests


# Made-up and changed workloads


def at_once(requests: Iterable[TraceRequest]) -> list[TraceRequest]:
    """The same requests, all there from the start."""
    return [replace(request, arrival_s=0.0) for request in requests]


def at_rate(requests: list[TraceRequest], requests_per_s: float) -> list[TraceRequest]:
    """The same requests in the same rhythm, faster or slower; the first one arrives at once."""
    first_s = requests[0].arrival_s
    span_s = (requests[-1].arrival_s - first_s) or 1.0
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

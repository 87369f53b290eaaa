"""Workloads: requests with their times, read from traces or made up.

Three formats, told apart by content: Mooncake's JSON lines (mooncake_trace.py), Azure's CSV, and JSON lines with text
(text_trace.py). The JSON formats may name a `lane` and a `tenant` on each line.
"""

import csv
import gzip
import json
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from itertools import islice
from pathlib import Path
from reprlib import repr as short  # of values that may be of any length: an error is one line
from typing import Any, BinaryIO, cast

import numpy as np

LANES = ("interactive", "standard", "batch")
AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
FIRST_ID = 3  # token ids below are special
# Beyond these a number is a mistake of whoever wrote the trace.
MOST_TOKENS = 1_000_000_000  # of a prompt, or of an output
MOST_TIME_S = 1e10  # since 1970: until the year 2286
LEAST_SPAN_S = 1e-6  # of a workload's arrivals: what came within less came at once


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
    conversation: str = ""  # requests of one are turns of it; empty: it stands alone


def read_trace(path: Path, *, vocab_size: int = 32_000, limit: int | None = None) -> list[TraceRequest]:
    """A trace in order of arrival; at most the first `limit` requests. Raises TraceError."""
    from trunkline_bench.simulation import mooncake_trace, text_trace

    requests: list[TraceRequest]
    number, first = next(filled_lines(path), (1, ""))
    if not first:
        raise TraceError(f"{path}: the file is empty")
    if first.strip().split(",")[: len(AZURE_COLUMNS)] == list(AZURE_COLUMNS):
        requests = _read_azure(path, vocab_size, limit)
    elif first.lstrip().startswith("{"):
        is_mooncake = "hash_ids" in json_line(path, number, first)
        requests = (mooncake_trace if is_mooncake else text_trace).read(path, vocab_size, limit)
    else:
        raise TraceError(f"{path}:{number}: neither JSON lines nor a CSV with {', '.join(AZURE_COLUMNS)}")
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


def filled_lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines that are not blank, with their numbers in the file."""
    return ((number, line) for number, line in numbered_lines(path) if line.strip())


def json_lines(path: Path, limit: int | None) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, object) of the first `limit` lines that are not blank."""
    for number, line in islice(filled_lines(path), limit):
        yield number, json_line(path, number, line)


def json_line(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except ValueError as error:
        raise TraceError(f"{path}:{number}: not JSON: {error}") from None
    except RecursionError:
        raise TraceError(f"{path}:{number}: not JSON that can be read: nested too deeply") from None
    if not isinstance(found, dict):
        raise TraceError(f"{path}:{number}: not a JSON object")
    return found


def number_of(path: Path, line: int, entry: dict[str, Any], name: str, least: float, most: float) -> float:
    """A field that must be a number from `least` to `most`."""
    value = entry.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        what = "is missing" if name not in entry else f"is {short(value)}"
        allowed = f"a number of at least {least:g} and at most {most:g}"
        raise TraceError(f"{path}:{line}: {name} {what}; it must be {allowed}")
    return value


def time_of(path: Path, line: int, entry: dict[str, Any], ticks_per_s: float) -> float:
    """`timestamp`, in seconds; it counts so many ticks a second."""
    return number_of(path, line, entry, "timestamp", 0, MOST_TIME_S * ticks_per_s) / ticks_per_s


def num_tokens_of(path: Path, line: int, entry: dict[str, Any], name: str) -> int:
    """A field that must be a whole number of tokens, one at least."""
    value = number_of(path, line, entry, name, 1, MOST_TOKENS)
    if value != int(value):
        raise TraceError(f"{path}:{line}: {name} is {short(value)}; it must be a whole number")
    return int(value)


def lane_and_tenant(path: Path, line: int, entry: dict[str, Any]) -> tuple[str, str]:
    lane, tenant = entry.get("lane", "standard"), entry.get("tenant", "")
    if lane not in LANES:
        raise TraceError(f"{path}:{line}: lane is {short(lane)}; it must be one of {', '.join(LANES)}")
    if not isinstance(tenant, str) or not is_text(tenant):
        raise TraceError(f"{path}:{line}: tenant is {short(tenant)}; it must be text")
    return lane, tenant


def is_text(value: str) -> bool:
    """Whether a string has no half of a surrogate pair, which JSON lets through."""
    return not any("\ud800" <= char <= "\udfff" for char in value)


def random_prompt(seed: int, count: int, vocab_size: int) -> list[int]:
    """Tokens that no other seed's prompt begins with."""
    draw = np.random.Generator(np.random.PCG64(seed))
    tokens: list[int] = draw.integers(FIRST_ID, vocab_size, count).tolist()
    return tokens


def _read_azure(path: Path, vocab_size: int, limit: int | None) -> list[TraceRequest]:
    """Azure LLM inference trace 2023: time, prompt tokens, output tokens. Prompts share nothing."""
    requests: list[TraceRequest] = []
    for line, row in islice(csv_rows(path), limit):
        try:
            # Seven digits of a second's fraction: one more than datetime takes.
            time_s = datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp()
        except (ValueError, OverflowError):
            raise TraceError(f"{path}:{line}: TIMESTAMP is {short(row['TIMESTAMP'])}, which is no time") from None
        lengths: dict[str, int] = {}
        for name in AZURE_COLUMNS[1:]:
            try:
                lengths[name] = int(row[name])
            except ValueError:
                raise TraceError(f"{path}:{line}: {name} is {short(row[name])}, which is no whole number") from None
        prompt_tokens, output_tokens = (num_tokens_of(path, line, lengths, name) for name in AZURE_COLUMNS[1:])
        prompt = partial(random_prompt, line, prompt_tokens, vocab_size)
        requests.append(TraceRequest(time_s, prompt_tokens, output_tokens, prompt))
    if not requests:
        raise TraceError(f"{path}: no requests")
    return requests


def csv_rows(path: Path) -> Iterator[tuple[int, dict[str, str]]]:
    """(number of its first line, cells by column) of each row that is not blank, after the one with the names. Cells
    that a row lacks are empty. Raises TraceError."""
    rows = csv.reader(line.strip() for _, line in numbered_lines(path))
    names: list[str] | None = None
    line = 1
    try:
        for cells in rows:
            if names is None:
                names = cells or None
            elif cells:
                yield line, dict.fromkeys(names, "") | dict(zip(names, cells, strict=False))
            line = rows.line_num + 1
    except csv.Error as error:
        raise TraceError(f"{path}:{line}: not CSV: {error}") from None


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

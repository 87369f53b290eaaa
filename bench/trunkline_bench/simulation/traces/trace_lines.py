"""Reads a trace file line by line, and decodes and checks its fields. Errors are one line of text."""

import gzip
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from reprlib import repr as short  # keeps errors to one line, however long a value is
from typing import Any, BinaryIO, cast

LANES = ("interactive", "standard", "batch")
# Larger values are mistakes in the trace.
MOST_TOKENS = 1_000_000_000  # of a prompt or an output
MOST_TIME_S = 1e10  # since 1970: until the year 2286
NAMED_LINES = 10  # number of skipped lines that are named


class TraceError(Exception):
    """A trace cannot be read. The message is one line with the file, the line number and the problem."""


class InvalidLineError(TraceError):
    """A line of a readable trace is not a request. With SkippedLines it would be skipped instead."""


class InvalidLine(Exception):
    """A line is not a request. The message is the problem, without the file and the line number."""


@dataclass(slots=True)
class SkippedLines:
    """The lines of a trace that were skipped because they are not requests."""

    count: int = 0
    first: list[int] = field(default_factory=list)  # line numbers, at most NAMED_LINES of them
    problem: str = ""  # of the first one

    def add(self, number: int, problem: InvalidLine) -> None:
        if not self.count:
            self.problem = str(problem)
        if len(self.first) < NAMED_LINES:
            self.first.append(number)
        self.count += 1

    def __str__(self) -> str:
        """One line of text; empty if no line was skipped."""
        if not self.count:
            return ""
        numbers = ", ".join(map(str, self.first)) + (", ..." if self.count > len(self.first) else "")
        lines = "line" if self.count == 1 else "lines"
        return f"skipped {self.count:,} invalid {lines}: {numbers} (line {self.first[0]}: {self.problem})"


def open_bytes(path: Path) -> BinaryIO:
    """Opens a file that may be compressed (.gz). Raises TraceError."""
    try:
        return cast(BinaryIO, gzip.open(path)) if path.suffix == ".gz" else path.open("rb")
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from None


def filled_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """(line number, line) of each line that is not blank.

    Raises TraceError, for a damaged compressed file only when the damage is reached."""
    number = 0
    with open_bytes(path) as lines:
        try:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield number, line
        except (OSError, EOFError, zlib.error) as error:
            raise TraceError(f"{path}:{number + 1}: cannot be read: {error}") from None


# All functions below raise InvalidLine.


def text_of(line: bytes) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise InvalidLine(f"not UTF-8: {error}") from None


def json_object(line: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except ValueError as error:
        raise InvalidLine(f"not JSON: {error}") from None
    except RecursionError:
        raise InvalidLine("JSON is nested too deeply") from None
    if not isinstance(found, dict):
        raise InvalidLine("not a JSON object")
    return found


def number_of(entry: dict[str, Any], name: str, least: float, most: float) -> float:
    """The value of a field that must be a number from `least` to `most`."""
    value = entry.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        what = "is missing" if name not in entry else f"is {short(value)}"
        raise InvalidLine(f"{name} {what}; it must be a number of at least {least:g} and at most {most:g}")
    return value


def time_of(entry: dict[str, Any], ticks_per_s: float) -> float:
    """`timestamp` in seconds; the trace has it in ticks."""
    return number_of(entry, "timestamp", 0, MOST_TIME_S * ticks_per_s) / ticks_per_s


def num_tokens_of(entry: dict[str, Any], name: str) -> int:
    """The value of a field that must be a whole number of tokens, at least one."""
    value = number_of(entry, name, 1, MOST_TOKENS)
    if value != int(value):
        raise InvalidLine(f"{name} is {short(value)}; it must be a whole number")
    return int(value)


def lane_and_tenant(entry: dict[str, Any]) -> tuple[str, str]:
    lane, tenant = entry.get("lane", "standard"), entry.get("tenant", "")
    if lane not in LANES:
        raise InvalidLine(f"lane is {short(lane)}; it must be one of {', '.join(LANES)}")
    if not isinstance(tenant, str) or not is_text(tenant):
        raise InvalidLine(f"tenant is {short(tenant)}; it must be text")
    return lane, tenant


def is_text(value: str) -> bool:
    """Whether a string is free of unpaired surrogates, which JSON allows."""
    return not any("\ud800" <= char <= "\udfff" for char in value)

"""Azure's LLM inference traces: a CSV of time, prompt tokens and output tokens. Prompts share no prefixes."""

import csv
from datetime import UTC, datetime
from functools import partial
from reprlib import repr as short

from trunkline_bench.simulation.traces.trace_lines import InvalidLine, num_tokens_of
from trunkline_bench.simulation.traces.trace_request import TraceRequest, random_prompt

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


def is_header(line: str) -> bool:
    return line.strip().split(",")[: len(COLUMNS)] == list(COLUMNS)


def request_of(number: int, line: str, vocab_size: int) -> TraceRequest:
    """The request of one row. Raises InvalidLine."""
    try:
        cells = next(csv.reader([line.strip()]))
    except csv.Error as error:
        raise InvalidLine(f"not CSV: {error}") from None
    time, *lengths = (cells + [""] * len(COLUMNS))[: len(COLUMNS)]  # missing cells count as empty
    time_s = _time_s(time)
    counts: dict[str, int] = {}
    for name, length in zip(COLUMNS[1:], lengths, strict=True):
        try:
            counts[name] = int(length)
        except ValueError:
            raise InvalidLine(f"{name} is {short(length)}, which is not a whole number") from None
    prompt_tokens, output_tokens = (num_tokens_of(counts, name) for name in COLUMNS[1:])
    return TraceRequest(time_s, prompt_tokens, output_tokens, partial(random_prompt, number, prompt_tokens, vocab_size))


def _time_s(text: str) -> float:
    """Seconds since 1970. A time without an offset is UTC, so that all machines see the same gaps.

    Raises InvalidLine."""
    try:
        time = datetime.fromisoformat(text.strip())
        return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        raise InvalidLine(f"TIMESTAMP is {short(text)}, which is not a time") from None

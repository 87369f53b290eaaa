"""Traces that contain the text, such as LMCache's agent traces: `timestamp` (µs), `input`, `output`.

Four bytes of text count as a token. No tokenizer is needed, since only equal texts have to give equal tokens.
"""

from functools import partial
from zlib import crc32

from trunkline_bench.simulation.traces.trace_lines import (
    InvalidLine,
    is_text,
    json_object,
    lane_and_tenant,
    time_of,
)
from trunkline_bench.simulation.traces.trace_request import FIRST_ID, TraceRequest

TICKS_PER_S = 1e6
BYTES_PER_TOKEN = 4


def request_of(number: int, line: str, vocab_size: int) -> TraceRequest:
    """The request of one line. Raises InvalidLine."""
    entry = json_object(line)
    time_s = time_of(entry, TICKS_PER_S)
    for name in ("input", "output"):
        if not isinstance(entry.get(name), str):
            raise InvalidLine(f"{name} must be text")
    try:
        prompt = entry["input"].encode()
    except UnicodeEncodeError as error:
        raise InvalidLine(f"input is not text: {error}") from None
    if not prompt:
        raise InvalidLine("input is empty")
    conversation = entry.get("session_id", "")
    if not isinstance(conversation, str) or not is_text(conversation):
        raise InvalidLine("session_id must be text")
    output = len(entry["output"].encode(errors="replace"))
    return TraceRequest(
        time_s,
        -(-len(prompt) // BYTES_PER_TOKEN),
        max(1, -(-output // BYTES_PER_TOKEN)),
        partial(tokens_of, prompt, vocab_size),
        *lane_and_tenant(entry),
        conversation,
    )


def tokens_of(text: bytes, vocab_size: int) -> list[int]:
    """One token for each four bytes."""
    pieces = (text[start : start + BYTES_PER_TOKEN] for start in range(0, len(text), BYTES_PER_TOKEN))
    return [FIRST_ID + crc32(piece) % (vocab_size - FIRST_ID) for piece in pieces]

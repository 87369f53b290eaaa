"""Traces with the text itself, such as LMCache's agent traces: `timestamp` (µs), `input`, `output`.

Without a tokenizer four bytes of text are a token: what matters here is that equal text gives equal tokens.
"""

from functools import partial
from pathlib import Path
from zlib import crc32

from trunkline_bench.simulation.traces import (
    FIRST_ID,
    TraceError,
    TraceRequest,
    json_lines,
    lane_and_tenant,
    time_of,
)

TICKS_PER_S = 1e6
BYTES_PER_TOKEN = 4


def read(path: Path, vocab_size: int, limit: int | None) -> list[TraceRequest]:
    """Raises TraceError."""
    requests = []
    for line, entry in json_lines(path, limit):
        time_s = time_of(path, line, entry, TICKS_PER_S)
        for name in ("input", "output"):
            if not isinstance(entry.get(name), str):
                raise TraceError(f"{path}:{line}: {name} must be text")
        try:
            prompt = entry["input"].encode()
        except UnicodeEncodeError as error:
            raise TraceError(f"{path}:{line}: input is not text: {error}") from None
        if not prompt:
            raise TraceError(f"{path}:{line}: input is empty")
        conversation = entry.get("session_id", "")
        if not isinstance(conversation, str):
            raise TraceError(f"{path}:{line}: session_id must be text")
        output = len(entry["output"].encode(errors="replace"))
        requests.append(
            TraceRequest(
                time_s,
                -(-len(prompt) // BYTES_PER_TOKEN),
                max(1, -(-output // BYTES_PER_TOKEN)),
                partial(tokens_of, prompt, vocab_size),
                *lane_and_tenant(path, line, entry),
                conversation,
            )
        )
    return requests


def tokens_of(text: bytes, vocab_size: int) -> list[int]:
    """One token for every four bytes."""
    pieces = (text[start : start + BYTES_PER_TOKEN] for start in range(0, len(text), BYTES_PER_TOKEN))
    return [FIRST_ID + crc32(piece) % (vocab_size - FIRST_ID) for piece in pieces]

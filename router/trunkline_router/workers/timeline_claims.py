"""Corrects what cannot be true in a worker's timeline of a choice, which decides nothing. Pure."""

from collections.abc import Iterable
from operator import attrgetter
from typing import Any

from google.protobuf.message import Message

from trunkline.v1.worker_pb2 import Timeline

# Of a timeline: what the contract allows.
MAX_CHUNKS, MAX_GAPS = 64, 16
MAX_COUNT = 1 << 20  # of steps, preemptions and gaps of one choice
MAX_BYTES = 5120  # wire size of a timeline that the contract allows: at most 4.4 kB
MOST_DOUBT_S = 1.0  # a timeline that tells the difference between clocks less exactly does not count
_TIMES = ("device_s", "longest_gap_s", "detokenize_s", "admitted_s")
_COUNTS = ("decode_steps", "preemptions", "recomputed_tokens", "num_gaps")


def believed_timeline(told: Timeline, most_s: float, prompt_tokens: int) -> Timeline:
    """Returns a copy whose times are in order and no longer than the attempt was; an empty one if it is larger than the
    contract allows. `received` is left out: the worker's clock may be wrong.

    most_s: since the choice was sent to the worker. prompt_tokens: of its prompt
    """
    believed = Timeline()
    if told.ByteSize() > MAX_BYTES or len(told.chunks) > MAX_CHUNKS or len(told.gaps) > MAX_GAPS:
        return believed
    believed.CopyFrom(told)
    believed.DiscardUnknownFields()
    believed.ClearField("received")
    _limit(believed, ("ended_s",), 0.0, most_s)
    end_s = believed.ended_s
    _limit(believed, _TIMES, 0.0, end_s)
    if not believed.HasField("admitted_s"):  # a first token needs an admission, and comes after it
        believed.ClearField("first_token_s")
    elif believed.HasField("first_token_s"):
        _limit(believed, ("first_token_s",), believed.admitted_s, end_s)
    chunks: Any = believed.chunks
    for chunk in chunks:
        _limit(chunk, ("started_s",), 0.0, end_s)
        _limit(chunk, ("duration_s",), 0.0, end_s - chunk.started_s)
    chunks.sort(key=attrgetter("started_s"))
    spans: Any
    for spans in (believed.gaps, believed.sampled_steps):
        for span in spans:
            _limit(span, ("at_s",), 0.0, end_s)  # where it ends
            _limit(span, ("duration_s",), 0.0, span.at_s)
        spans.sort(key=attrgetter("at_s"))
    _limit(believed, _COUNTS, 0, MAX_COUNT)
    _limit(believed, ("cached_tokens",), 0, prompt_tokens)
    return believed


def clock_skew_s(told: Timeline, sent_unix_s: float, most_s: float) -> float | None:
    """Returns the worker's clock minus this router's; None if the timeline does not tell.

    The worker received the choice after it was sent, and as long before its end as it lasted there. What the worker's
    clock showed then is compared with the middle of the two.

    sent_unix_s: when the choice was sent. most_s: as for believed_timeline()
    """
    doubt_s = most_s - told.ended_s  # in which the choice was under way to the worker, and its end back
    if not told.HasField("received") or not 0.0 <= doubt_s <= MOST_DOUBT_S:
        return None
    received_unix_s = told.received.seconds + told.received.nanos / 1e9
    return received_unix_s - (sent_unix_s + doubt_s / 2)


def _limit(message: Message, names: Iterable[str], least: float, most: float) -> None:
    """Brings fields within bounds; to `least` if a value is not a number."""
    for name in names:
        value = getattr(message, name)
        if not least <= value <= most:
            setattr(message, name, most if value > most else least)

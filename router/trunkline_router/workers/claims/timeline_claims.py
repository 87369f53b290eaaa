"""Checks what a worker says of a choice's timeline. It decides nothing, so what cannot be true is corrected."""

from operator import attrgetter

from trunkline.v1.worker_pb2 import Timeline

MAX_CHUNKS, MAX_GAPS = 64, 16  # what the contract allows
MAX_COUNT = 1 << 20  # of steps, preemptions and gaps of one choice
MAX_BYTES = 5120  # wire size of a timeline that the contract allows: at most 4.4 kB
MOST_DOUBT_S = 1.0  # a timeline that tells the difference between clocks less exactly does not count
_COUNTS = ("decode_steps", "preemptions", "recomputed_tokens", "num_gaps")


def believed_timeline(told: Timeline, most_s: float, prompt_tokens: int) -> Timeline:
    """Returns a copy that is bounded in size, whose times are in order and no longer than the attempt was. `received`
    is left out: the worker's clock may be wrong. Most timelines need no correction, which takes a few microseconds.

    most_s: since the choice was sent to the worker. prompt_tokens: of its prompt
    """
    believed = Timeline()
    believed.CopyFrom(told)
    believed.DiscardUnknownFields()
    believed.ClearField("received")
    if len(told.chunks) > MAX_CHUNKS or len(told.gaps) > MAX_GAPS or told.ByteSize() > MAX_BYTES:
        believed = _cut(believed)
    if not 0.0 <= believed.ended_s <= most_s:
        believed.ended_s = within(believed.ended_s, 0.0, most_s)
    end_s = believed.ended_s
    _order_phases(believed, end_s)
    if not 0.0 <= believed.device_s <= end_s:
        believed.device_s = within(believed.device_s, 0.0, end_s)
    if believed.chunks:
        _correct_chunks(believed, end_s)
    if believed.gaps or believed.longest_gap_s:
        _correct_gaps(believed, end_s)
    if believed.cached_tokens > prompt_tokens:
        believed.cached_tokens = prompt_tokens
    for name in _COUNTS:
        if getattr(believed, name) > MAX_COUNT:
            setattr(believed, name, MAX_COUNT)
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


def within(value: float, least: float, most: float) -> float:
    """Returns the value within bounds; `least` for what is not a number."""
    return min(value, most) if value >= least else least


def _cut(believed: Timeline) -> Timeline:
    """Without the entries that the contract does not allow. What is deleted from a message stays in its memory for as
    long as the message lives, so this is a new one."""
    del believed.chunks[MAX_CHUNKS:]
    del believed.gaps[MAX_GAPS:]
    return Timeline.FromString(believed.SerializeToString())


def _order_phases(believed: Timeline, end_s: float) -> None:
    """A first token needs an admission, and comes after it."""
    if not believed.HasField("admitted_s"):
        believed.ClearField("first_token_s")
        return
    admitted_s = believed.admitted_s
    if not 0.0 <= admitted_s <= end_s:
        admitted_s = believed.admitted_s = within(admitted_s, 0.0, end_s)
    if believed.HasField("first_token_s") and not admitted_s <= believed.first_token_s <= end_s:
        believed.first_token_s = within(believed.first_token_s, admitted_s, end_s)


def _correct_chunks(believed: Timeline, end_s: float) -> None:
    chunks = believed.chunks
    last_s = 0.0
    is_sorted = True
    for chunk in chunks:
        started_s, duration_s = chunk.started_s, chunk.duration_s
        if not 0.0 <= started_s <= end_s:
            started_s = chunk.started_s = within(started_s, 0.0, end_s)
        if not 0.0 <= duration_s <= end_s - started_s:
            chunk.duration_s = within(duration_s, 0.0, end_s - started_s)
        is_sorted &= started_s >= last_s
        last_s = started_s
    if not is_sorted:
        chunks.sort(key=attrgetter("started_s"))


def _correct_gaps(believed: Timeline, end_s: float) -> None:
    believed.longest_gap_s = within(believed.longest_gap_s, 0.0, end_s)
    gaps = believed.gaps
    for gap in gaps:
        gap.at_s = within(gap.at_s, 0.0, end_s)
        gap.duration_s = within(gap.duration_s, 0.0, gap.at_s)
    gaps.sort(key=attrgetter("at_s"))

"""Validates the outputs of choices, as claims.py validates what workers say of themselves, and corrects what cannot be
true in their timelines, which decide nothing. Pure."""

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import isfinite
from operator import attrgetter
from typing import Any

from google.protobuf.message import Message

from trunkline.sampling_params import MAX_TOP_LOGPROBS
from trunkline.status import code_of
from trunkline.v1.generation_pb2 import FinishReason, OutputChunk, PromptReport, RequestError, TokenLogprobs
from trunkline.v1.worker_pb2 import GrantReport, SequenceOutput, Submit, Timeline
from trunkline.validation import MAX_STOP_BYTES, WHOLE_OUTPUTS

MAX_REASON_CHARACTERS = 128
# Wire size of one choice's output of one step: some hundred tokens with 20 log-probabilities each, or text held back
# for a stop string. A prompt's log-probabilities come on top if they were requested.
MOST_OUTPUT_BYTES = 256 << 10
LOGPROB_BYTES = 24
FLOAT_BYTES = 4
WHOLE = frozenset(WHOLE_OUTPUTS.values())
ABORT = FinishReason.FINISH_REASON_ABORT
_FINISH_REASONS = frozenset(FinishReason.values()) - {FinishReason.FINISH_REASON_UNSPECIFIED}
# Of a timeline: what the contract allows.
MAX_CHUNKS, MAX_GAPS = 64, 16
MAX_COUNT = 1 << 20  # of steps, preemptions and gaps of one choice
MAX_TIMELINE_BYTES = 5120  # wire size of a timeline that the contract allows: at most 4.4 kB
MOST_DOUBT_S = 1.0  # a timeline that tells the difference between clocks less exactly does not count
_TIMES = ("device_s", "longest_gap_s", "detokenize_s", "admitted_s", "awaited_s")
_COUNTS = ("decode_steps", "preemptions", "recomputed_tokens", "num_gaps")


# Takes an output. Returns False if it does not follow the previous one.
Sink = Callable[[SequenceOutput], object]


@dataclass(slots=True)
class OpenChoice:
    """A choice that was sent to a worker, and the output that the worker may still send."""

    index: int  # among its request's choices
    sink: Sink = field(compare=False)
    left_tokens: int  # output tokens that may still come
    prompt_tokens: int
    vocab_size: int
    suspect: bool = False  # whether it was submitted as a suspect
    has_logprobs: bool = False  # whether log-probabilities were requested; others are not looked at
    is_first: bool = True  # whether its first output is still to come
    whole: str = ""  # "vector" or "score" if that is its output; "": tokens
    dimensions: int = 0  # of a vector; 0: not known
    most_bytes: int = MOST_OUTPUT_BYTES  # of one SequenceOutput


def most_output_bytes(submit: Submit) -> int:
    """The largest wire size of one SequenceOutput of this choice."""
    sampling = submit.sampling
    if not sampling.HasField("prompt_logprobs"):
        return MOST_OUTPUT_BYTES
    return MOST_OUTPUT_BYTES + len(submit.prompt_token_ids) * (sampling.prompt_logprobs + 1) * LOGPROB_BYTES


def output_problem(output: SequenceOutput, chunk: OutputChunk, choice: OpenChoice) -> str | None:
    """The problem with the next output of a choice, if it is not an error. `chunk` is the output's chunk; without
    one it is empty. Updates `choice`."""
    if choice.whole:
        return _whole_problem(output, chunk, choice)
    if chunk.index != choice.index:
        return f"output for choice {chunk.index} came under the handle of choice {choice.index}"
    token_ids = chunk.token_ids
    if num_tokens := len(token_ids):
        if num_tokens > choice.left_tokens:
            return "there are more tokens than were requested"
        choice.left_tokens -= num_tokens
        if strange := [token_id for token_id in token_ids if not 0 <= token_id < choice.vocab_size]:
            return f"token id {strange[0]} is not in [0, {choice.vocab_size})"
    elif is_whole(output):
        return f"a {output.WhichOneof('output')} came for a choice of tokens"
    if chunk.finish_reason and (problem := _end_problem(chunk)):
        return problem
    if choice.has_logprobs and chunk.logprobs and (problem := _logprobs_problem(chunk.logprobs, num_tokens)):
        return problem
    if choice.is_first:
        choice.is_first = False
        return _prompt_problem(output.prompt, choice.prompt_tokens)
    return None


def is_whole(output: SequenceOutput) -> bool:
    """Whether it is the output of a choice that has no tokens."""
    return output.WhichOneof("output") in WHOLE


def end_problem(output: SequenceOutput, choice: OpenChoice) -> str | None:
    """The problem with the output of a choice that is an error."""
    if output.sole_suspect and not (output.suspect and choice.suspect):
        return "it reports a sole suspect that was not submitted as a suspect"
    return error_problem(output.error)


def error_problem(error: RequestError) -> str | None:
    """The problem with the error with which a worker ends a request."""
    if not (error.reason and error.reason.isprintable() and len(error.reason) <= MAX_REASON_CHARACTERS):
        return "the request was refused without a reason"
    if len(error.field) > MAX_REASON_CHARACTERS or not error.field.isprintable():
        return "the request was refused for a field without a name"
    expected = code_of(error.reason)
    if error.code != expected if expected is not None else not 0 < error.code <= 16:
        return f"the request was refused with {error.reason} and code {error.code}"
    return None


def report_problem(report: GrantReport, *, prompt_tokens: int, most_tokens: int) -> str | None:
    """The problem with the report of a grant for this many prompt tokens and at most `most_tokens` output tokens."""
    if report.prompt_tokens not in (0, prompt_tokens) or report.cached_tokens > report.prompt_tokens:
        found = f"{report.prompt_tokens} prompt tokens with {report.cached_tokens} cached"
        return f"it reports {found} for a prompt of {prompt_tokens} tokens"
    if report.output_tokens > most_tokens:
        return f"it reports {report.output_tokens} output tokens for a limit of {most_tokens}"
    return None


def _whole_problem(output: SequenceOutput, chunk: OutputChunk, choice: OpenChoice) -> str | None:
    """The problem with the output of a choice that has no tokens: it comes at once, or the choice is aborted."""
    kind = output.WhichOneof("output")
    is_aborted = chunk.finish_reason == ABORT and not (chunk.token_ids or chunk.text) and chunk.index == choice.index
    if kind != choice.whole and not is_aborted:
        return f"a {kind} came for a choice whose output is a {choice.whole}"
    if kind == "vector" and len(output.vector.values) % FLOAT_BYTES:
        return f"a vector has {len(output.vector.values)} bytes"
    values: Sequence[float] = array("f", output.vector.values) if kind == "vector" else output.score.values
    if kind == "vector" and choice.dimensions and len(values) != choice.dimensions:
        return f"a vector has {len(values)} components instead of {choice.dimensions}"
    if not is_aborted and not (values and all(map(isfinite, values))):
        return f"a {kind} has no values, or some that are not finite"
    return _prompt_problem(output.prompt, choice.prompt_tokens)


def _end_problem(chunk: OutputChunk) -> str | None:
    if chunk.finish_reason not in _FINISH_REASONS:
        return f"finish reason {chunk.finish_reason} is not known"
    if len(chunk.stop_string) > MAX_STOP_BYTES:
        return f"a stop string has {len(chunk.stop_string)} characters"
    return None


def _prompt_problem(report: PromptReport, prompt_tokens: int) -> str | None:
    if report.cached_tokens > prompt_tokens:
        return f"it reports {report.cached_tokens} cached tokens for a prompt of {prompt_tokens} tokens"
    return _logprobs_problem(report.logprobs, prompt_tokens) if report.logprobs else None


def _logprobs_problem(logprobs: Sequence[TokenLogprobs], num_tokens: int) -> str | None:
    if len(logprobs) != num_tokens:
        return f"{len(logprobs)} log-probabilities came for {num_tokens} tokens"
    for entry in logprobs:
        top = entry.top
        if len(top) > MAX_TOP_LOGPROBS:
            return f"a token came with {len(top)} log-probabilities"
        if entry.chosen.logprob != entry.chosen.logprob or any(other.logprob != other.logprob for other in top):
            return "a log-probability is not a number"
    return None


def believed_timeline(claimed: Timeline, most_s: float, prompt_tokens: int) -> Timeline:
    """Returns a copy whose times are in order and no longer than the attempt was; an empty one if it is larger than the
    contract allows. `received` is left out: the worker's clock may be wrong.

    most_s: since the choice was sent to the worker. prompt_tokens: of its prompt
    """
    believed = Timeline()
    if claimed.ByteSize() > MAX_TIMELINE_BYTES or len(claimed.chunks) > MAX_CHUNKS or len(claimed.gaps) > MAX_GAPS:
        return believed
    believed.CopyFrom(claimed)
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


def clock_skew_s(claimed: Timeline, sent_unix_s: float, most_s: float) -> float | None:
    """Returns the worker's clock minus this router's; None if the timeline does not tell.

    The worker received the choice after it was sent, and as long before its end as it lasted there. What the worker's
    clock showed then is compared with the middle of the two.

    sent_unix_s: when the choice was sent. most_s: as for believed_timeline()
    """
    doubt_s = most_s - claimed.ended_s  # in which the choice was under way to the worker, and its end back
    if not claimed.HasField("received") or not 0.0 <= doubt_s <= MOST_DOUBT_S:
        return None
    received_unix_s = claimed.received.seconds + claimed.received.nanos / 1e9
    return received_unix_s - (sent_unix_s + doubt_s / 2)


def _limit(message: Message, names: Iterable[str], least: float, most: float) -> None:
    """Brings fields within bounds; to `least` if a value is not a number."""
    for name in names:
        value = getattr(message, name)
        if not least <= value <= most:
            setattr(message, name, most if value > most else least)

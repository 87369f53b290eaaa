"""Validates what workers say, on arrival. Pure.

The functions named `…_problem` take a message and return the problem with it in one line, or None. A valid message
cannot break the arithmetic of routing, the status of a request or another worker's requests. It may still be untrue.

A timeline decides nothing, so what cannot be true in it is corrected.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from google.protobuf.message import Message

from trunkline.grant import GrantKeys
from trunkline.protocol import OLDEST_PROTOCOL, PROTOCOL_VERSION
from trunkline.status import RequestRefused, code_of
from trunkline.v1.generation_pb2 import (
    FinishReason,
    OutputChunk,
    PromptReport,
    RequestError,
    SamplingParams,
    TokenLogprobs,
)
from trunkline.v1.worker_pb2 import (
    GetModelResponse,
    GrantReport,
    LoadSample,
    SequenceOutput,
    SessionWelcome,
    Submit,
    Timeline,
)
from trunkline.validation import MAX_STOP_BYTES, MAX_TOP_LOGPROBS, validate_sampling
from trunkline_router.routing.route_request import NUM_LANES

MAX_NAME_CHARACTERS = 512  # of names, fingerprints and similar strings
MAX_DIGEST_BYTES = 64
MAX_DIGESTS = 8  # of a worker: its tokenizer's and its grant keys'
MAX_EOS_TOKENS = 1024
# Each limit is well above the largest value of any known model or machine. The policy computes with products of these
# values in doubles, and reports them in fields of 32 and 64 bits.
MAX_VOCAB_SIZE = 1 << 24
MAX_CONTEXT_TOKENS = 1 << 26
MAX_CHOICES = 1 << 24
MAX_TOKENS = 1 << 48
MAX_PRICE_PER_HOUR = 1e9  # what --price-per-hour of a worker allows
# A token's text is at most a few hundred bytes. Text held back for a stop string arrives with later tokens.
MAX_TOKEN_CHARACTERS = 1024
MAX_HELD_TOKENS = 1024
MAX_REASON_CHARACTERS = 128
# Wire size of one choice's output of one step: some hundred tokens with 20 log-probabilities each, or text held back
# for a stop string. A prompt's log-probabilities come on top if they were requested.
MOST_OUTPUT_BYTES = 256 << 10
LOGPROB_BYTES = 24

# Of a timeline: what the contract allows.
MAX_CHUNKS, MAX_GAPS = 64, 16
MAX_COUNT = 1 << 20  # of steps, preemptions and gaps of one choice
MAX_BYTES = 5120  # wire size of a timeline that the contract allows: at most 4.4 kB
MOST_DOUBT_S = 1.0  # a timeline that tells the difference between clocks less exactly does not count

NO_KEYS = GrantKeys()
_FINISH_REASONS = frozenset(FinishReason.values()) - {FinishReason.FINISH_REASON_UNSPECIFIED}
_NAMES = ("model", "worker_id", "fingerprint", "architecture", "dtype", "device", "batching", "admission")
_MODEL_RANGES: dict[str, tuple[float, float]] = {
    "block_size": (1, 1 << 16),
    "vocab_size": (1, MAX_VOCAB_SIZE),
    "context_length": (1, MAX_CONTEXT_TOKENS),
    "kv_token_capacity": (1, 1 << 44),
    "max_step_tokens": (0, 1 << 24),
    "max_running_requests": (0, MAX_CHOICES),
    "itl_target_ms": (0.0, 60_000.0),
    "interactive_reserve": (0.0, 1.0),
    "batch_window_ms": (0.0, 3.6e6),
    "price_per_hour": (0.0, MAX_PRICE_PER_HOUR),
}
_LOAD_RANGES: dict[str, tuple[float, float]] = {
    **dict.fromkeys(("running", "waiting"), (0, MAX_CHOICES)),
    **dict.fromkeys(("waiting_uncached_tokens", "waiting_tokens", "running_kv_tokens"), (0, MAX_TOKENS)),
}
_COST_RANGES = dict.fromkeys(("fixed_s", "token_s", "kv_token_s", "pair_s"), (0.0, 1e3))
_TIMES = ("device_s", "longest_gap_s", "detokenize_s", "admitted_s")
_COUNTS = ("decode_steps", "preemptions", "recomputed_tokens", "num_gaps")
_BY_LANE = ("waiting_by_lane", "retry_delay_ms_by_lane", "uncached_tokens_by_lane")
# The sampling parameters for which a router uses the model's default if a client does not set them. The model's other
# defaults are neither checked nor used.
DEFAULTED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


class WorkerUnusable(Exception):
    """The worker cannot be used, perhaps because it has another version. The message is one line for people."""


class FalseClaim(WorkerUnusable):
    """A message of the worker cannot be true. The router waits longer before it reconnects than after a disconnect."""


def check_model(model: GetModelResponse, keys: GrantKeys = NO_KEYS) -> None:
    """Raises WorkerUnusable if this router cannot send requests to a worker with this description."""
    if model.min_router_protocol > PROTOCOL_VERSION:
        raise WorkerUnusable(
            f"the worker asks for routers that speak protocol {model.min_router_protocol}, and this one speaks "
            f"{PROTOCOL_VERSION}: upgrade routers before workers"
        )
    if model.protocol_version < OLDEST_PROTOCOL:
        raise WorkerUnusable(
            f"the worker speaks protocol {model.protocol_version}, and this router needs {OLDEST_PROTOCOL} or a later "
            "one: upgrade the worker"
        )
    if model.grant_key_ids and not keys.of_worker(model):
        lacks = "has another one" if keys else "has none"
        raise WorkerUnusable(f"the worker has a grant key, and this router {lacks}: start both with one --grant-key")
    if problem := model_problem(model):
        raise WorkerUnusable(problem)


def model_problem(model: GetModelResponse) -> str | None:
    """The problem with a worker's model description."""
    if not model.model:
        return "the worker does not say which model it serves"
    for name in _NAMES:
        if problem := _name_problem(name, getattr(model, name)):
            return problem
    if problem := _range_problem(model, _MODEL_RANGES):
        return problem
    digests = (model.tokenizer_digest, *model.grant_key_ids)
    if any(len(digest) > MAX_DIGEST_BYTES for digest in digests) or len(digests) > MAX_DIGESTS:
        return (
            f"the worker's tokenizer_digest and grant_key_ids are more than {MAX_DIGESTS}, or longer than "
            f"{MAX_DIGEST_BYTES} bytes"
        )
    if len(model.eos_token_ids) > MAX_EOS_TOKENS or not _are_tokens(model.eos_token_ids, model.vocab_size):
        return f"the worker's eos_token_ids are not at most {MAX_EOS_TOKENS} tokens below its vocab_size"
    return _defaults_problem(model.default_sampling)


def welcome_problem(welcome: SessionWelcome, model: GetModelResponse) -> str | None:
    """The problem with the answer to opening a session. A new epoch alone is none: the worker was restarted."""
    if welcome.worker_id != model.worker_id:
        return "the worker's session has another worker_id than its model"
    return None


def load_problem(load: LoadSample) -> str | None:
    """The problem with a load sample."""
    if problem := _range_problem(load, _LOAD_RANGES):
        return problem
    for name in _BY_LANE:
        if (count := len(getattr(load, name))) not in (0, NUM_LANES):
            return f"the worker's {name} has {count} entries; allowed: {NUM_LANES}, or none"
    if any(tokens > MAX_TOKENS for tokens in load.uncached_tokens_by_lane):
        return f"the worker's uncached_tokens_by_lane has more than {MAX_TOKENS} tokens"
    return _range_problem(load.step_cost, _COST_RANGES) if load.HasField("step_cost") else None


@dataclass(slots=True)
class Expected:
    """The output of a choice that a worker may still send."""

    choice: int
    left_tokens: int  # output tokens that may still come
    prompt_tokens: int
    vocab_size: int
    suspect: bool = False  # whether it was submitted as a suspect
    is_first: bool = True  # whether its first output is still to come
    most_bytes: int = MOST_OUTPUT_BYTES  # of one SequenceOutput


def most_output_bytes(submit: Submit) -> int:
    """The largest wire size of one SequenceOutput of this choice."""
    sampling = submit.sampling
    if not sampling.HasField("prompt_logprobs"):
        return MOST_OUTPUT_BYTES
    return MOST_OUTPUT_BYTES + len(submit.prompt_token_ids) * (sampling.prompt_logprobs + 1) * LOGPROB_BYTES


def output_problem(output: SequenceOutput, chunk: OutputChunk, expected: Expected) -> str | None:
    """The problem with the next output of a choice, if it is not an error. `chunk` is the output's chunk. Updates
    `expected`. Hot path: every token of every request passes through here."""
    if chunk.index != expected.choice:
        if not output.HasField("chunk"):
            return None  # a field of a newer worker that this router does not know
        return f"output for choice {chunk.index} came under the handle of choice {expected.choice}"
    token_ids = chunk.token_ids
    if num_tokens := len(token_ids):
        expected.left_tokens -= num_tokens
        if expected.left_tokens < 0:
            return "there are more tokens than were requested"
        if num_tokens == 1:
            if not 0 <= token_ids[0] < expected.vocab_size:
                return f"token id {token_ids[0]} is not in [0, {expected.vocab_size})"
        elif not _are_tokens(token_ids, expected.vocab_size):
            return f"a token id is not in [0, {expected.vocab_size})"
    if len(chunk.text) > (num_tokens + MAX_HELD_TOKENS) * MAX_TOKEN_CHARACTERS:
        return f"{len(chunk.text)} characters of text came with {num_tokens} tokens"
    if chunk.finish_reason and (problem := _end_problem(chunk)):
        return problem
    if chunk.logprobs and (problem := _logprobs_problem(chunk.logprobs, num_tokens)):
        return problem
    if expected.is_first:
        expected.is_first = False
        return _prompt_problem(output.prompt, expected.prompt_tokens)
    return None


def end_problem(output: SequenceOutput, expected: Expected) -> str | None:
    """The problem with the output of a choice that is an error."""
    if output.sole_suspect and not (output.suspect and expected.suspect):
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


def _defaults_problem(defaults: SamplingParams) -> str | None:
    filled_in = SamplingParams()
    for name in DEFAULTED:
        if defaults.HasField(name):  # type: ignore[arg-type]
            setattr(filled_in, name, getattr(defaults, name))
    try:
        validate_sampling(filled_in, vocab_size=1, prefix="the worker's default_sampling")
    except RequestRefused as refused:
        return refused.message
    return None


def _range_problem(message: Message, ranges: dict[str, tuple[float, float]]) -> str | None:
    for name, (least, most) in ranges.items():
        value = getattr(message, name)
        if not least <= value <= most:  # NaN fails too
            return f"the worker's {name} is {value}; allowed: {least:.15g} to {most:.15g}"
    return None


def _name_problem(name: str, text: str) -> str | None:
    if len(text) <= MAX_NAME_CHARACTERS and text.isprintable():
        return None
    return f"the worker's {name} is not at most {MAX_NAME_CHARACTERS} printable characters"


def _are_tokens(token_ids: Iterable[int], vocab_size: int) -> bool:
    ids = list(token_ids)
    return not ids or (min(ids) >= 0 and max(ids) < vocab_size)


def _limit(message: Message, names: Iterable[str], least: float, most: float) -> None:
    """Brings fields within bounds; to `least` if a value is not a number."""
    for name in names:
        value = getattr(message, name)
        if not least <= value <= most:
            setattr(message, name, most if value > most else least)

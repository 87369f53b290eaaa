"""Validates the outputs of choices, as claims.py validates what workers say of themselves. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from trunkline.status import code_of
from trunkline.v1.generation_pb2 import FinishReason, OutputChunk, PromptReport, RequestError, TokenLogprobs
from trunkline.v1.worker_pb2 import GrantReport, SequenceOutput, Submit
from trunkline.validation import MAX_STOP_BYTES, MAX_TOP_LOGPROBS

MAX_REASON_CHARACTERS = 128
# Wire size of one choice's output of one step: some hundred tokens with 20 log-probabilities each, or text held back
# for a stop string. A prompt's log-probabilities come on top if they were requested.
MOST_OUTPUT_BYTES = 256 << 10
LOGPROB_BYTES = 24
_FINISH_REASONS = frozenset(FinishReason.values()) - {FinishReason.FINISH_REASON_UNSPECIFIED}


@dataclass(slots=True)
class Expected:
    """The output of a choice that a worker may still send."""

    choice: int
    left_tokens: int  # output tokens that may still come
    prompt_tokens: int
    vocab_size: int
    suspect: bool = False  # whether it was submitted as a suspect
    has_logprobs: bool = False  # whether log-probabilities were requested; others are not looked at
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
    `expected`."""
    if chunk.index != expected.choice:
        if not output.HasField("chunk"):
            return None  # a field of a newer worker that this router does not know
        return f"output for choice {chunk.index} came under the handle of choice {expected.choice}"
    token_ids = chunk.token_ids
    if num_tokens := len(token_ids):
        if num_tokens > expected.left_tokens:
            return "there are more tokens than were requested"
        expected.left_tokens -= num_tokens
        if strange := [token_id for token_id in token_ids if not 0 <= token_id < expected.vocab_size]:
            return f"token id {strange[0]} is not in [0, {expected.vocab_size})"
    if chunk.finish_reason and (problem := _end_problem(chunk)):
        return problem
    if expected.has_logprobs and chunk.logprobs and (problem := _logprobs_problem(chunk.logprobs, num_tokens)):
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

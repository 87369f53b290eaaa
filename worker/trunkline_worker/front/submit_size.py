"""Checks the size of a submit, in bytes and fields, while it is unparsed. validate_submit() checks its fields."""

from trunkline.status import RequestRefused, context_exceeded, invalid
from trunkline.v1.worker_pb2 import GetModelResponse, Submit, WorkerServiceGenerateRequest
from trunkline.validation import (
    MAX_GRAMMAR_BYTES,
    MAX_LOGIT_BIAS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    max_total_tokens,
)
from trunkline_runtime.wire import NotAMessage, fields

# Up to this size a submit is parsed unchecked: with any content, parsing takes far less than a millisecond.
UNSEEN_BYTES = 16 << 10
ID_BYTES = 5  # most bytes of a token id in a packed list, as every writer sends it
# Names, trace contexts, stop strings of a KiB each, and biases.
OTHER_BYTES = 128 << 10
# Fields of a submit with every list at its maximum length; a list of token ids counts as one.
MOST_FIELDS = 64 + MAX_STOP_STRINGS + MAX_STOP_TOKEN_IDS + MAX_LOGIT_BIAS
_INSIDE = (Submit.SAMPLING_FIELD_NUMBER, Submit.RESUME_FIELD_NUMBER, Submit.WORK_FIELD_NUMBER)


def most_submit_bytes(model: GetModelResponse) -> int:
    """Returns the largest size in bytes: prompt and ledger, together at most the model's tokens, a direct client's
    grammar, and other fields."""
    grammar_bytes = MAX_GRAMMAR_BYTES if model.max_session_grammar_bytes else 0
    return ID_BYTES * max_total_tokens(model) + grammar_bytes + OTHER_BYTES


def check_submit(raw: bytes, at: int, end: int, most_bytes: int) -> None:
    """Checks the submit at raw[at:end]. Raises RequestRefused if it has too many bytes or fields, NotAMessage if it
    cannot be read."""
    if end - at <= UNSEEN_BYTES:
        return
    if end - at > most_bytes:
        raise context_exceeded(f"the submit has {end - at} bytes, more than the model can take: {most_bytes}")
    num_fields = 0
    for number, _, value_at, value_end in fields(raw, at, end):
        num_fields += 1
        if number in _INSIDE:
            for _ in fields(raw, value_at, value_end):
                num_fields += 1
                if num_fields > MOST_FIELDS:
                    raise _too_many()
        if num_fields > MOST_FIELDS:
            raise _too_many()


def check_generate(raw: bytes, most_bytes: int) -> None:
    """Checks a WorkerServiceGenerateRequest. Skips a grant's content: its signature is checked before it is parsed.
    Raises RequestRefused if the request is too large or cannot be read."""
    if len(raw) <= UNSEEN_BYTES:
        return
    try:
        for count, (number, _, at, end) in enumerate(fields(raw)):
            if count > MOST_FIELDS:
                raise _too_many()
            if number == WorkerServiceGenerateRequest.SUBMIT_FIELD_NUMBER:
                check_submit(raw, at, end, most_bytes)
    except NotAMessage as error:
        raise invalid("request", f"is not a valid message: {error}") from None


def _too_many() -> RequestRefused:
    return invalid("submit", f"a submit has at most {MOST_FIELDS} fields and entries")

"""How large a submit may be, looked at on the wire: what cannot be a legal one is not parsed."""

from trunkline.status import RequestRefused, context_exceeded, invalid
from trunkline.v1.worker_pb2 import GetModelResponse, Submit, WorkerServiceGenerateRequest
from trunkline.validation import MAX_LOGIT_BIAS, MAX_STOP_STRINGS, MAX_STOP_TOKEN_IDS, max_total_tokens
from trunkline_runtime.wire import NotAMessage, fields

# Up to this size a submit is parsed unseen: whatever is in it takes far less than a millisecond.
UNSEEN_BYTES = 16 << 10
ID_BYTES = 5  # of a token id; packed, as every writer does it
# Names, trace contexts, stop strings of a KiB each, and biases.
OTHER_BYTES = 128 << 10
# Of a submit with every list as long as it may be, lists of token ids as one.
MOST_FIELDS = 64 + MAX_STOP_STRINGS + MAX_STOP_TOKEN_IDS + MAX_LOGIT_BIAS
_INSIDE = (Submit.SAMPLING_FIELD_NUMBER, Submit.RESUME_FIELD_NUMBER)


def most_submit_bytes(model: GetModelResponse) -> int:
    """Of prompt and ledger, which are never longer together than the model takes, and everything else."""
    return ID_BYTES * max_total_tokens(model) + OTHER_BYTES


def check_submit(raw: bytes, at: int, end: int, most_bytes: int) -> None:
    """Of the submit at raw[at:end]. Raises RequestRefused and NotAMessage."""
    if end - at <= UNSEEN_BYTES:
        return
    if end - at > most_bytes:
        raise context_exceeded(f"a submit of {end - at} bytes is more than the model can take: {most_bytes}")
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
    """Of a WorkerServiceGenerateRequest. A grant is not looked into: its signature is checked before it is parsed.
    Raises RequestRefused."""
    if len(raw) <= UNSEEN_BYTES:
        return
    try:
        for count, (number, _, at, end) in enumerate(fields(raw)):
            if count > MOST_FIELDS:
                raise _too_many()
            if number == WorkerServiceGenerateRequest.SUBMIT_FIELD_NUMBER:
                check_submit(raw, at, end, most_bytes)
    except NotAMessage as error:
        raise invalid("request", f"is no message: {error}") from None


def _too_many() -> RequestRefused:
    return invalid("submit", f"a submit has at most {MOST_FIELDS} fields and entries")

"""Splits messages of a Session stream, so that no part keeps either end busy for long."""

from collections.abc import Iterator

from trunkline.protocol import MAX_SUBMITS_BYTES
from trunkline.v1.worker_pb2 import SequenceOutput, SessionRequest, SessionResponse
from trunkline_router.workers.claims.model_check import FalseClaim
from trunkline_runtime.wire import LENGTH, VARINT, fields, varint

# In a response that is parsed in parts. A newer worker may send fields that this router does not know.
MAX_UNKNOWN_BYTES = 4 << 10

_OUTPUTS = SessionResponse.OUTPUTS_FIELD_NUMBER
_OUTPUTS_TAG = _OUTPUTS << 3 | LENGTH
_WELCOME_TAG = SessionResponse.WELCOME_FIELD_NUMBER << 3 | LENGTH
_HANDLE_TAG = SequenceOutput.HANDLE_FIELD_NUMBER << 3 | VARINT


def split_request(request: SessionRequest) -> Iterator[SessionRequest]:
    """Yields the request in messages that a worker accepts: a burst of long prompts can exceed one message."""
    if len(request.submits) <= 1 or request.ByteSize() <= MAX_SUBMITS_BYTES:
        if request.submits or request.abort_handles:
            yield request  # uncopied: a copy of a prompt of 8,000 tokens takes 150 µs
        return
    part, size = SessionRequest(), 0
    for submit in request.submits:
        submit_bytes = submit.ByteSize()
        if part.submits and size + submit_bytes > MAX_SUBMITS_BYTES:
            yield part
            part, size = SessionRequest(), 0
        part.submits.append(submit)
        size += submit_bytes
    # Last: an abort must not overtake its own submit.
    part.abort_handles.extend(request.abort_handles)
    if part.submits or part.abort_handles:
        yield part


def split_response(raw: bytes, most_bytes: int, most_fields: int) -> Iterator[bytes]:
    """Yields a SessionResponse in parts, each of at most `most_bytes`, or of a single field, and of at most
    `most_fields`. Raises NotAMessage; raises FalseClaim if no honest worker would send it."""
    begin = num_fields = num_welcomes = unknown_bytes = 0
    for _, field_at, _, field_end in fields(raw):
        tag = raw[field_at]
        if tag == _WELCOME_TAG:
            num_welcomes += 1
            if num_welcomes > 1:
                raise FalseClaim("the worker opens its session twice")
        elif tag != _OUTPUTS_TAG:
            unknown_bytes += field_end - field_at
            if unknown_bytes > MAX_UNKNOWN_BYTES:
                raise FalseClaim(f"a message of the worker's session has more than {MAX_UNKNOWN_BYTES} unknown bytes")
        if begin < field_at and (field_end - begin > most_bytes or num_fields == most_fields):
            yield raw[begin:field_at]
            begin, num_fields = field_at, 0
        num_fields += 1
    if begin < len(raw):
        yield raw[begin:]


def large_output(part: bytes) -> int | None:
    """Returns the handle of a SessionResponse's only field, an output; None if the field is not an output. Relies on
    every writer putting a message's fields in the order of their numbers. Raises NotAMessage."""
    ((number, _, value_at, _),) = fields(part)
    if number != _OUTPUTS or part[value_at] != _HANDLE_TAG:
        return None
    return varint(part, value_at + 1)[0]

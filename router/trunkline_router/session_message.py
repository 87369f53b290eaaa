"""Messages of a Session stream, cut to a size that neither end has to work on for long."""

from collections.abc import Iterator

from trunkline.v1.worker_pb2 import SequenceOutput, SessionRequest, SessionResponse
from trunkline_runtime.wire import VARINT, fields, varint

MAX_REQUEST_BYTES = 1 << 20  # of submits in one message

_OUTPUTS = SessionResponse.OUTPUTS_FIELD_NUMBER
_HANDLE_TAG = SequenceOutput.HANDLE_FIELD_NUMBER << 3 | VARINT


def split_request(request: SessionRequest) -> Iterator[SessionRequest]:
    """The same in messages that a worker accepts: a burst of long prompts can be more than one may hold."""
    if len(request.submits) <= 1 or request.ByteSize() <= MAX_REQUEST_BYTES:
        if request.submits or request.abort_handles:
            yield request  # as it is: to copy a prompt of 8,000 tokens once more takes 150 µs
        return
    part, size = SessionRequest(), 0
    for submit in request.submits:
        submit_bytes = submit.ByteSize()
        if part.submits and size + submit_bytes > MAX_REQUEST_BYTES:
            yield part
            part, size = SessionRequest(), 0
        part.submits.append(submit)
        size += submit_bytes
    # Last: an abort must not overtake its own submit.
    part.abort_handles.extend(request.abort_handles)
    if part.submits or part.abort_handles:
        yield part


def large_output(part: bytes) -> int | None:
    """The handle of the single output of a SessionResponse that holds nothing else; None where it is none. Every
    writer puts the fields of a message in the order of their numbers. Raises NotAMessage."""
    ((number, _, value_at, _),) = fields(part)
    if number != _OUTPUTS or part[value_at] != _HANDLE_TAG:
        return None
    return varint(part, value_at + 1)[0]

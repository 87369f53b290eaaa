"""Counts the fields of a message on the wire: one that has more than any legal request is not parsed.

Parsing makes requests large: an empty chat message takes two bytes on the wire and a hundred in memory. What a request
says is checked once it is parsed, when it is prepared.
"""

import asyncio
from collections.abc import Iterator, Mapping
from functools import cache

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from trunkline.status import invalid
from trunkline.v1 import fleet_pb2, inference_pb2
from trunkline.validation import MAX_LOGIT_BIAS, MAX_STOP_STRINGS, MAX_STOP_TOKEN_IDS
from trunkline_router.prompts.conversation import MAX_MESSAGES, MAX_PARTS, MAX_TOOLS
from trunkline_runtime.wire import LENGTH, NotAMessage, fields

MAX_REQUEST_BYTES = 8 << 20  # the largest text, or two million token ids, and room for the other fields
# Requests up to this size are parsed unchecked: any content takes less than a millisecond and a MiB.
UNSEEN_BYTES = 16 << 10
# The longest conversation with the most tools, the most sampling parameters, and the other fields. A part has five: the
# part, the call or result, and its three texts.
CHAT_FIELDS = 3 * MAX_MESSAGES + 5 * MAX_PARTS + 5 * MAX_TOOLS
MAX_FIELDS = CHAT_FIELDS + 3 * MAX_LOGIT_BIAS + MAX_STOP_STRINGS + MAX_STOP_TOKEN_IDS + 64
FIELDS_PER_STEP = 2048  # counted without a pause: about 2 ms
MAX_UNKNOWN_BYTES = 4 << 10  # of unknown fields, which newer clients may send. They stay in memory with the request

METHODS: Mapping[str, Descriptor] = {  # full name → the type of its requests
    f"/{service.full_name}/{method.name}": method.input_type
    for described in (inference_pb2.DESCRIPTOR, fleet_pb2.DESCRIPTOR)
    for service in described.services_by_name.values()
    for method in service.methods
}


async def check_size(method: str, raw: bytes) -> None:
    """Raises RequestRefused (INVALID_REQUEST) if a request has more fields than any legal one or is not a message."""
    if len(raw) <= UNSEEN_BYTES or method not in METHODS:
        return
    try:
        for _ in count_fields(raw, METHODS[method]):
            await asyncio.sleep(0)  # lets other tasks run
    except NotAMessage as error:
        raise invalid("request", f"is not a message: {error}") from None


def count_fields(raw: bytes, message: Descriptor) -> Iterator[None]:
    """Yields every FIELDS_PER_STEP fields. Raises RequestRefused, or NotAMessage if a field exceeds its message."""
    num_fields = unknown_bytes = 0
    waiting = [(message, 0, len(raw))]
    while waiting:
        message, at, end = waiting.pop()
        known = _known_fields(message)
        for number, begin, value_at, field_end in fields(raw, at, end):
            num_fields += 1
            described = known.get(number)
            if described is None:
                unknown_bytes += field_end - begin
                if unknown_bytes > MAX_UNKNOWN_BYTES:
                    raise invalid("request", f"has more than {MAX_UNKNOWN_BYTES} bytes of unknown fields: {number}")
            elif described.message_type is not None and raw[begin] & 7 == LENGTH:
                waiting.append((described.message_type, value_at, field_end))
            if num_fields > MAX_FIELDS:
                name = "request" if described is None else described.name
                raise invalid(name, f"a request has at most {MAX_FIELDS} fields and entries")
            if num_fields % FIELDS_PER_STEP == 0:
                yield


@cache
def _known_fields(message: Descriptor) -> Mapping[int, FieldDescriptor]:
    return dict(message.fields_by_number)

"""How large a request may be, looked at on the wire: a message that cannot be a legal request is not parsed.

Parsing is where a request of a few bytes an entry becomes large: an empty chat message is two bytes on the wire and a
hundred in memory. The bounds here hold for all requests; the exact limits of a model are checked where its requests are
prepared. The wire format: https://protobuf.dev/programming-guides/encoding
"""

import asyncio
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from trunkline.status import CODE_RESOURCE_EXHAUSTED, OVERLOADED, RequestRefused, context_exceeded, invalid
from trunkline.v1 import fleet_pb2, inference_pb2
from trunkline.validation import MAX_LOGIT_BIAS, MAX_STOP_STRINGS, MAX_STOP_TOKEN_IDS, max_total_tokens
from trunkline_router.chat_template import MAX_MESSAGES
from trunkline_router.pool import Pools

MAX_REQUEST_BYTES = 8 << 20  # the largest text there may be, or two million token ids, and room for the other fields
# Requests up to this size are parsed unseen: whatever is in them takes less than a millisecond and a MiB.
UNSEEN_BYTES = 16 << 10
# A conversation with as many messages as there may be, sampling parameters in full, and the other fields.
MAX_FIELDS = 3 * MAX_MESSAGES + 3 * MAX_LOGIT_BIAS + MAX_STOP_STRINGS + MAX_STOP_TOKEN_IDS + 64
FIELDS_PER_STEP = 2048  # are checked at once: about 2 ms
MAX_DETOKENIZED_IDS = 1 << 18  # or a context's, where one is longer

# Of larger ones, as they came, of one account (open_calls.py) and of all until their answers begin: three or four times
# as much lies in memory. Requests that are being answered do not count. Workers bound how many there are, and long
# contexts are usual.
MAX_ACCOUNT_BYTES, MAX_HELD_BYTES = 48 << 20, 128 << 20
RETRY_MS = 1000

ID_BYTES = 4  # a token id takes no more as a varint: vocabularies have fewer than 2^28 tokens
VARINT_BYTES = 10
VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5

PROMPT_IDS = "trunkline.v1.TokenIds.ids"
DETOKENIZED_IDS = "trunkline.v1.DetokenizeRequest.token_ids"
STOP_TOKEN_IDS = "trunkline.v1.SamplingParams.stop_token_ids"


class RequestSize:
    """Checks requests of every method, by the longest context of the models that are served at the moment."""

    def __init__(self, pools: Pools) -> None:
        self._pools = pools
        self._held: Counter[str] = Counter()  # bytes of large requests without an answer, by account
        self._num_held = 0

    async def check(self, method: str, raw: bytes) -> None:
        """Raises RequestRefused (INVALID_REQUEST) where a request is larger than any legal one, or is no message."""
        if len(raw) <= UNSEEN_BYTES or method not in SHAPES:
            return
        most_tokens = max((max_total_tokens(pool.limits) for pool in self._pools.models().values()), default=0)
        most_ids = {
            PROMPT_IDS: most_tokens,
            DETOKENIZED_IDS: max(MAX_DETOKENIZED_IDS, most_tokens),
            STOP_TOKEN_IDS: MAX_STOP_TOKEN_IDS,
        }
        try:
            for _ in _check_fields(raw, SHAPES[method], most_ids):
                await asyncio.sleep(0)  # others have their turn
        except IndexError:
            raise invalid("request", "is no message: it ends within a field") from None

    @contextmanager
    def holding(self, num_bytes: int, account: str) -> Iterator[None]:
        """Counts a large request until its answer begins. Raises RequestRefused (OVERLOADED) where too many wait."""
        if self._held[account] + num_bytes > MAX_ACCOUNT_BYTES or self._num_held + num_bytes > MAX_HELD_BYTES:
            message = "too many large requests wait for their answers"
            raise RequestRefused(CODE_RESOURCE_EXHAUSTED, OVERLOADED, message, retry_delay_ms=RETRY_MS)
        self._held[account] += num_bytes
        self._num_held += num_bytes
        try:
            yield
        finally:
            self._num_held -= num_bytes
            self._held[account] -= num_bytes
            if not self._held[account]:
                del self._held[account]


@dataclass(frozen=True, slots=True)
class Shape:
    """What a message can hold, by field number."""

    names: dict[int, str] = field(default_factory=dict)  # full ones
    inside: "dict[int, Shape]" = field(default_factory=dict)


def _check_fields(raw: bytes, shape: Shape, most_ids: Mapping[str, int]) -> Iterator[None]:
    """Yields after every FIELDS_PER_STEP. Raises RequestRefused; IndexError where a field ends after its message."""
    num_fields = 0
    run_bytes: Counter[str] = Counter()  # of packed token ids, by field
    waiting = [(shape, 0, len(raw))]
    while waiting:
        shape, at, end = waiting.pop()
        names, inside = shape.names, shape.inside
        while at < end:
            number, at = _varint(raw, at)
            wire, number = number & 7, number >> 3
            num_fields += 1
            if not num_fields % FIELDS_PER_STEP:
                yield
            if num_fields > MAX_FIELDS:
                name = names.get(number, "request").rpartition(".")[2]
                raise invalid(name, f"a request has at most {MAX_FIELDS} fields and entries")
            if wire == LENGTH:
                size, at = _varint(raw, at)
                if number in inside:
                    if size:
                        waiting.append((inside[number], at, at + size))
                elif (name := names.get(number, "")) in most_ids:
                    run_bytes[name] += size
                    if run_bytes[name] > max(UNSEEN_BYTES, ID_BYTES * most_ids[name]):
                        raise _too_many(name, run_bytes[name], most_ids[name])
                at += size
            elif wire == VARINT:
                _, at = _varint(raw, at)
            elif wire in (FIXED32, FIXED64):
                at += 4 if wire == FIXED32 else 8
            else:
                raise invalid("request", f"is no message: wire type {wire} at byte {at}")
        if at != end:
            raise IndexError


def _too_many(name: str, num_bytes: int, most: int) -> RequestRefused:
    problem = f"{num_bytes} bytes of token ids are more than {most} token ids can take"
    return context_exceeded(problem) if name == PROMPT_IDS else invalid(name.rpartition(".")[2], problem)


def _varint(raw: bytes, at: int) -> tuple[int, int]:
    """Its value, and where it ends. Raises IndexError."""
    byte = raw[at]
    if byte < 128:
        return byte, at + 1
    value, shift = byte & 127, 7
    for index in range(at + 1, at + VARINT_BYTES):
        byte = raw[index]
        value |= (byte & 127) << shift
        if byte < 128:
            return value, index + 1
        shift += 7
    raise IndexError


def _shape(message: Descriptor | None) -> Shape:
    shape = Shape()
    for described in message.fields if message is not None else ():
        shape.names[described.number] = described.full_name
        if described.type == FieldDescriptor.TYPE_MESSAGE:
            shape.inside[described.number] = _shape(described.message_type)
    return shape


SHAPES: Mapping[str, Shape] = {
    f"/{service.full_name}/{method.name}": _shape(method.input_type)
    for described in (inference_pb2.DESCRIPTOR, fleet_pb2.DESCRIPTOR)
    for service in described.services_by_name.values()
    for method in service.methods
}

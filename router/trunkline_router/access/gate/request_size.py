"""Size limits that are checked on the wire format: a message that cannot be a legal request is not parsed.

Parsing makes requests large: an empty chat message takes two bytes on the wire and a hundred in memory. The limits here
hold for all requests. The exact limits of a model are checked when its requests are prepared.
"""

import asyncio
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from trunkline.status import RequestRefused, context_exceeded, invalid
from trunkline.v1 import fleet_pb2, inference_pb2
from trunkline.validation import MAX_LOGIT_BIAS, MAX_STOP_STRINGS, MAX_STOP_TOKEN_IDS, max_total_tokens
from trunkline_router.prompts.chat_template import MAX_MESSAGES
from trunkline_router.prompts.tokenizer import MAX_CHAT_BYTES, MAX_TEXT_BYTES
from trunkline_router.workers.pool import Pools
from trunkline_runtime.wire import LENGTH, NotAMessage, fields

MAX_REQUEST_BYTES = 8 << 20  # the largest text, or two million token ids, and room for the other fields
# Requests up to this size are parsed unchecked: any content takes less than a millisecond and a MiB.
UNSEEN_BYTES = 16 << 10
# The longest conversation, the most sampling parameters, and the other fields.
MAX_FIELDS = 3 * MAX_MESSAGES + 3 * MAX_LOGIT_BIAS + MAX_STOP_STRINGS + MAX_STOP_TOKEN_IDS + 64
FIELDS_PER_STEP = 2048  # checked without a pause: about 2 ms
MAX_DETOKENIZED_IDS = 1 << 18  # or the length of the longest context, if that is more

# Total of unknown fields, which newer clients may send. Total of names, stop strings and other short texts.
MAX_UNKNOWN_BYTES, MAX_NAME_BYTES = 4 << 10, 64 << 10

ID_BYTES = 4  # the longest varint of a token id: vocabularies have fewer than 2^28 tokens

PROMPT_IDS = "trunkline.v1.TokenIds.ids"
DETOKENIZED_IDS = "trunkline.v1.DetokenizeRequest.token_ids"
STOP_TOKEN_IDS = "trunkline.v1.SamplingParams.stop_token_ids"
TEXTS = ("trunkline.v1.GenerateRequest.text", "trunkline.v1.TokenizeRequest.text")
CHATS = ("trunkline.v1.GenerateRequest.chat", "trunkline.v1.TokenizeRequest.chat")
TEXT_BYTES = {**dict.fromkeys(TEXTS, MAX_TEXT_BYTES), **dict.fromkeys(CHATS, MAX_CHAT_BYTES)}
# These count as their chat.
CHAT_TEXTS = (
    "trunkline.v1.ChatMessage.role",
    "trunkline.v1.ChatMessage.content",
    "trunkline.v1.ChatMessages.template_variables",
)


class RequestSize:
    """Checks the requests of every method against the longest context of the models served at the moment."""

    def __init__(self, pools: Pools) -> None:
        self._pools = pools

    async def check(self, method: str, raw: bytes) -> None:
        """Raises RequestRefused (INVALID_REQUEST) if a request is larger than any legal one or is not a message."""
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
                await asyncio.sleep(0)  # lets other tasks run
        except NotAMessage as error:
            raise invalid("request", f"is not a message: {error}") from None


@dataclass(frozen=True, slots=True)
class Shape:
    """The fields of a message type, by field number."""

    names: dict[int, str] = field(default_factory=dict)  # full names
    inside: "dict[int, Shape]" = field(default_factory=dict)  # of nested messages
    strings: set[int] = field(default_factory=set)
    chat_texts: set[int] = field(default_factory=set)  # those of `strings` that count as their conversation


def _check_fields(raw: bytes, shape: Shape, most_ids: Mapping[str, int]) -> Iterator[None]:
    """Yields every FIELDS_PER_STEP fields. Raises RequestRefused, or NotAMessage if a field exceeds its message."""
    num_fields = unknown_bytes = name_bytes = 0
    num_bytes: Counter[str] = Counter()  # of texts, conversations and packed token ids, by field
    most_bytes = TEXT_BYTES | {name: max(UNSEEN_BYTES, ID_BYTES * most) for name, most in most_ids.items()}
    next_stop = FIELDS_PER_STEP
    waiting = [(shape, 0, len(raw))]
    while waiting:
        shape, at, end = waiting.pop()
        names, inside, strings, chat_texts = shape.names, shape.inside, shape.strings, shape.chat_texts
        for number, begin, value_at, field_end in fields(raw, at, end):
            num_fields += 1
            if num_fields == next_stop:
                _check_num_fields(num_fields, names.get(number, ""))
                next_stop = min(next_stop + FIELDS_PER_STEP, MAX_FIELDS + 1)
                yield
            if number in chat_texts:  # most fields of a long conversation
                continue
            name = names.get(number, "")
            if not name:
                unknown_bytes += field_end - begin
                _check_unknown_bytes(unknown_bytes, number)
            if raw[begin] & 7 != LENGTH:
                continue
            size = field_end - value_at
            if number in inside and size:
                waiting.append((inside[number], value_at, field_end))
            if name in most_bytes:
                num_bytes[name] += size
                if num_bytes[name] > most_bytes[name]:
                    raise _too_many(name, num_bytes[name], most_ids[name]) if name in most_ids else _too_long(name)
            elif number in strings:
                name_bytes += size
                if name_bytes > MAX_NAME_BYTES:
                    raise invalid(_last(name), f"names and stop strings have at most {MAX_NAME_BYTES} bytes together")


def _check_num_fields(num_fields: int, name: str) -> None:
    if num_fields > MAX_FIELDS:
        raise invalid(_last(name) or "request", f"a request has at most {MAX_FIELDS} fields and entries")


def _check_unknown_bytes(unknown_bytes: int, number: int) -> None:
    if unknown_bytes > MAX_UNKNOWN_BYTES:
        raise invalid("request", f"has more than {MAX_UNKNOWN_BYTES} bytes of unknown fields: {number}")


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _too_long(name: str) -> RequestRefused:
    if name in TEXTS:
        return invalid("text", f"text of more than {MAX_TEXT_BYTES} bytes is not tokenized")
    return invalid("chat", f"a conversation of more than {MAX_CHAT_BYTES} bytes is not rendered")


def _too_many(name: str, num_bytes: int, most: int) -> RequestRefused:
    problem = f"{num_bytes} bytes of token ids are more than {most} token ids can take"
    return context_exceeded(problem) if name == PROMPT_IDS else invalid(_last(name), problem)


def _shape(message: Descriptor | None) -> Shape:
    shape = Shape()
    for described in message.fields if message is not None else ():
        shape.names[described.number] = described.full_name
        if described.type == FieldDescriptor.TYPE_MESSAGE:
            shape.inside[described.number] = _shape(described.message_type)
        elif described.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES):
            shape.strings.add(described.number)
            if described.full_name in CHAT_TEXTS:
                shape.chat_texts.add(described.number)
    return shape


SHAPES: Mapping[str, Shape] = {
    f"/{service.full_name}/{method.name}": _shape(method.input_type)
    for described in (inference_pb2.DESCRIPTOR, fleet_pb2.DESCRIPTOR)
    for service in described.services_by_name.values()
    for method in service.methods
}

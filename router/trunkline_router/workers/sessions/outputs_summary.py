"""Summarizes all outputs of one session message, at a fraction of the cost of reading each of them.

Protobuf merges a singular field that occurs twice, and joins its lists. So if `outputs` is parsed as a singular field,
a session message becomes one output whose lists hold the values of all. Token ids are parsed as unsigned numbers, so
that the largest one reveals negative ones too. The field numbers are those of SessionResponse, SequenceOutput and
OutputChunk.
"""

from dataclasses import dataclass
from typing import Any

from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

PACKAGE = "trunkline.router"
# By message: each field's name, number and kind.
_MESSAGES: dict[str, tuple[tuple[str, int, str], ...]] = {
    "Message": (("welcome", 1, "bytes"), ("outputs", 2, "Outputs")),
    "Outputs": (
        ("handle", 1, "number"),
        ("chunk", 2, "Chunks"),
        ("prompt", 3, "bytes"),
        ("error", 4, "bytes"),
        ("granted", 7, "bytes"),
    ),
    # Fields that are not read here are listed too: the library takes longer to keep unknown ones.
    "Chunks": (
        ("index", 1, "numbers"),
        ("first_token_index", 2, "number"),
        ("token_ids", 3, "numbers"),
        ("text", 4, "bytes"),
        ("text_offset", 5, "number"),
        ("logprobs", 6, "bytes"),
        ("finish_reason", 7, "number"),
    ),
}


@dataclass(frozen=True, slots=True)
class OutputsSummary:
    """A summary of one session message.

    tokens_alone: no output is an error, a grant's report, or the first or last output of its choice
    is_indexed: some output belongs to another choice than its request's first
    """

    tokens_alone: bool
    is_indexed: bool


def outputs_summary(raw: bytes, vocab_size: int) -> OutputsSummary | None:
    """Returns the summary of a session message; None if its outputs must be checked one by one, because it has
    log-probabilities or a token id outside [0, vocab_size). Raises DecodeError."""
    outputs = _MESSAGE.FromString(raw).outputs
    chunks = outputs.chunk
    if chunks.HasField("logprobs") or max(chunks.token_ids[:], default=0) >= vocab_size:
        return None
    return OutputsSummary(
        not (
            chunks.HasField("finish_reason")
            or outputs.HasField("error")
            or outputs.HasField("granted")
            or outputs.HasField("prompt")
        ),
        bool(chunks.index),
    )


def _message_class() -> Any:
    file = FileDescriptorProto(name="trunkline/router/outputs_summary.proto", package=PACKAGE, syntax="proto2")
    field_type = {
        "bytes": FieldDescriptorProto.TYPE_BYTES,
        "number": FieldDescriptorProto.TYPE_UINT64,
        "numbers": FieldDescriptorProto.TYPE_UINT64,
    }
    for message_name, described in _MESSAGES.items():
        message = file.message_type.add(name=message_name)
        for name, number, kind in described:
            label = FieldDescriptorProto.LABEL_REPEATED if kind == "numbers" else FieldDescriptorProto.LABEL_OPTIONAL
            made = message.field.add(name=name, number=number, label=label)
            made.type = field_type.get(kind, FieldDescriptorProto.TYPE_MESSAGE)
            if kind in _MESSAGES:
                made.type_name = f".{PACKAGE}.{kind}"
    pool = DescriptorPool()
    pool.Add(file)
    return GetMessageClass(pool.FindMessageTypeByName(f"{PACKAGE}.Message"))


_MESSAGE = _message_class()

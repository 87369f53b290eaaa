"""What a worker could say instead of what is so: every field of a message, one at a time, by its descriptor."""

from collections.abc import Iterator, Sequence
from math import inf, nan
from typing import Any, TypeVar, cast

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

M = TypeVar("M", bound=Message)
LONG = 20_000  # characters, bytes and entries: what is too much for a name or a list of lanes
OF_TYPE: dict[int, tuple[Any, ...]] = {
    FieldDescriptor.CPPTYPE_INT32: (0, -1, 1, (1 << 31) - 1, -(1 << 31)),
    FieldDescriptor.CPPTYPE_INT64: (0, -1, 1, (1 << 63) - 1, -(1 << 63)),
    FieldDescriptor.CPPTYPE_UINT32: (0, 1, 1 << 31, (1 << 32) - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 1, 1 << 31, 1 << 63, (1 << 64) - 1),
    FieldDescriptor.CPPTYPE_DOUBLE: (0.0, nan, inf, -inf, -1.0, 1e308, 1e-308),
    FieldDescriptor.CPPTYPE_FLOAT: (0.0, nan, inf, -inf, -1.0, 3e38, 1e-38),
    FieldDescriptor.CPPTYPE_ENUM: (0, 1, 99, -1),
    FieldDescriptor.CPPTYPE_STRING: ("", "x" * LONG, "\0", "two\nlines", "\u202e", b"", b"\0" * LONG, b"\xff"),
}


def lies(message: M) -> Iterator[tuple[str, M]]:
    """Copies of a message in which one thing is different, each with a name."""
    yield "everything", type(message)()
    yield from _lies(message, "")


def _lies(message: M, path: str) -> Iterator[tuple[str, M]]:
    for field in cast("Sequence[FieldDescriptor]", message.DESCRIPTOR.fields):  # either implementation's
        name = f"{path}{field.name}"
        if field.is_repeated:
            yield from _lists(message, field, name)
        elif field.message_type is not None:
            for inner_name, inner in _lies(getattr(message, field.name), f"{name}."):
                changed = _copy(message)
                getattr(changed, field.name).CopyFrom(inner)
                yield inner_name, changed
            changed = _copy(message)
            getattr(changed, field.name).SetInParent()
            if message.HasField(field.name):
                changed.ClearField(field.name)
            yield f"{name} there or not", changed
        else:
            for value in _values(field):
                changed = _copy(message)
                setattr(changed, field.name, value)
                yield f"{name}={str(value)[:12]!r}", changed


def _lists(message: M, field: FieldDescriptor, name: str) -> Iterator[tuple[str, M]]:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        return
    for count in (0, 1, 2, 4, LONG):
        changed = _copy(message)
        changed.ClearField(field.name)
        entries = getattr(changed, field.name)
        for _ in range(count):
            if field.message_type is not None:
                entries.add()
            else:
                entries.append(_entry(field, count))
        yield f"{name}[{count}]", changed
    for value in () if field.message_type is not None else _values(field):
        changed = _copy(message)
        entries = getattr(changed, field.name)
        entries[:1] = [value]
        yield f"{name}[0]={str(value)[:12]!r}", changed


def _entry(field: FieldDescriptor, count: int) -> Any:
    """An entry of a list. Either it is long or there are many: both at once were 400 MB, more than gRPC takes."""
    value = _values(field)[1]
    return value[:1] if count == LONG and isinstance(value, (str, bytes)) else value


def _values(field: FieldDescriptor) -> tuple[Any, ...]:
    if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        return (False, True)
    values = OF_TYPE[field.cpp_type]
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        kind = bytes if field.type == FieldDescriptor.TYPE_BYTES else str
        return tuple(value for value in values if isinstance(value, kind))
    return values


def _copy(message: M) -> M:
    copied = type(message)()
    copied.CopyFrom(message)
    return copied

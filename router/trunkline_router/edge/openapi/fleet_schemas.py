"""What the endpoints under /fleet answer: the messages of FleetService, as live/fleet_json.py writes them."""

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from trunkline.v1.fleet_pb2 import (
    DrainWorkerResponse,
    GetRequestResponse,
    ListRequestsResponse,
    RequestSummary,
    UndrainWorkerResponse,
    WatchFleetResponse,
)
from trunkline_router.edge.live.fleet_json import words_of
from trunkline_router.edge.openapi.schema_parts import (
    BOOLEAN,
    INTEGER,
    NULL,
    NUMBER,
    STRING,
    Schema,
    array,
    component,
    nullable,
    one_of,
    record,
)

_CPP = FieldDescriptor
_KINDS = {
    _CPP.CPPTYPE_STRING: STRING,
    _CPP.CPPTYPE_BOOL: BOOLEAN,
    _CPP.CPPTYPE_DOUBLE: {"anyOf": [NUMBER, NULL]},  # null: not a number that JSON has
    _CPP.CPPTYPE_UINT32: INTEGER,
    _CPP.CPPTYPE_UINT64: INTEGER,
}


def _schemas() -> dict[str, Schema]:
    """The schema of each message, by its name."""
    found: dict[str, Descriptor] = {}
    answers = WatchFleetResponse, GetRequestResponse, DrainWorkerResponse, UndrainWorkerResponse
    open_ = [message.DESCRIPTOR for message in answers]
    while open_:
        descriptor = open_.pop()
        if descriptor.name not in found:
            found[descriptor.name] = descriptor
            open_ += [field.message_type for field in descriptor.fields if field.message_type is not None]
    return {name: record(_properties(descriptor)) for name, descriptor in sorted(found.items())}


def _properties(descriptor: Descriptor) -> dict[str, Schema]:
    return {field.name: _field(field) for field in descriptor.fields}


def _field(field: FieldDescriptor) -> Schema:
    if field.message_type is not None:
        value = component(field.message_type.name)
    elif field.enum_type is not None:
        value = one_of(*words_of(field.enum_type).values(), "unknown")
    else:
        value = _KINDS[field.cpp_type]
    if field.is_repeated:
        return array(value)
    return nullable(value) if field.has_presence else value


def _story() -> Schema:
    """A timeline has the fields of its summary beside its own."""
    own = _properties(GetRequestResponse.DESCRIPTOR)
    del own["summary"]
    return record({**_properties(RequestSummary.DESCRIPTOR), **own})


SCHEMAS: dict[str, Schema] = {
    **_schemas(),
    "RequestStory": _story(),
    "RequestList": record(_properties(ListRequestsResponse.DESCRIPTOR)),
}

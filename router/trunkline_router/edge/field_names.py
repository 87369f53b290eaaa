"""The names of fields in refusals: the shared path's become those that the client sent."""

from collections.abc import Mapping

from trunkline.status import RequestRefused

SAMPLING = "sampling."  # its fields are fields of the body over HTTP

FieldNames = Mapping[str, str]  # from the shared path's names, without SAMPLING, to an endpoint's


def renamed(refused: RequestRefused, names: FieldNames) -> RequestRefused:
    """Returns the refusal with its field as the clients of an endpoint name it, in its message too."""
    field = refused.field
    name, bracket, index = field.removeprefix(SAMPLING).partition("[")
    name = names.get(name, name) + bracket + index
    if field and refused.message.startswith(f"{field}: "):
        refused.message = f"{name}: {refused.message.removeprefix(f'{field}: ')}"
    refused.field = name
    return refused

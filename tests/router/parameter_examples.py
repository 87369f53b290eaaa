"""An example of each sampling parameter that the table gives to JSON bodies, and what a request then has."""

from collections.abc import Mapping, Sequence
from typing import Any

from trunkline.sampling_params import TABLE, Http
from trunkline.v1.generation_pb2 import SamplingParams


def examples(*bodies: Http) -> dict[str, Any]:
    """The fields of a body, with the values as SamplingParams have them."""
    return {name: row.example for name, row in TABLE.items() if row.http in bodies}


def as_json(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields as JSON has them, in which the keys of objects are strings."""
    return {
        name: {str(key): item for key, item in value.items()} if isinstance(value, Mapping) else value
        for name, value in fields.items()
    }


def values(sampling: SamplingParams, names: Mapping[str, Any]) -> dict[str, Any]:
    """The values of these parameters."""
    found = {name: getattr(sampling, name) for name in names}
    kinds = {name: TABLE[name].kind for name in names}
    plain = {Sequence[int]: list, Mapping[int, float]: dict}
    return {name: plain[kinds[name]](value) if kinds[name] in plain else value for name, value in found.items()}

"""The table of sampling parameters agrees with the contract, and validation with the table."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from google.protobuf.descriptor import FieldDescriptor

from trunkline.sampling_params import BY_MODEL, EXAMPLES, NEUTRAL, NUMBERS, TABLE
from trunkline.status import RequestRefused
from trunkline.v1.generation_pb2 import SamplingParams
from trunkline.validation import validate_sampling

FIELDS = SamplingParams.DESCRIPTOR.fields_by_name
VOCAB = 100
KINDS = {
    FieldDescriptor.TYPE_FLOAT: float,
    FieldDescriptor.TYPE_UINT32: int,
    FieldDescriptor.TYPE_UINT64: int,
    FieldDescriptor.TYPE_BOOL: bool,
    FieldDescriptor.TYPE_INT32: Sequence[int],
    FieldDescriptor.TYPE_STRING: Sequence[str],
    FieldDescriptor.TYPE_MESSAGE: Mapping[int, float],
}


def beside(value: float, towards: float) -> float:
    """The next number that a float field can carry."""
    return float(np.nextafter(np.float32(value), np.float32(towards)))


def edges() -> Iterator[tuple[str, float, bool]]:
    """Values at the ends of each range, and whether they are allowed."""
    for name, row in TABLE.items():
        if row.least is not None:
            yield name, row.least, not row.least_is_excluded
            yield name, beside(row.least, -math.inf), False
            yield name, beside(row.least, math.inf), True
            yield from ((name, value, False) for value in (math.nan, math.inf, -math.inf))
        if row.most is not None:
            yield name, row.most, True
            yield name, row.most + 1 if row.kind is int else beside(row.most, math.inf), False


def test_the_table_has_the_fields_of_the_contract_with_their_types() -> None:
    assert {name: row.kind for name, row in TABLE.items()} == {
        name: KINDS[field.type] for name, field in FIELDS.items()
    }


@pytest.mark.parametrize("name", TABLE)
def test_a_row_is_complete(name: str) -> None:
    row = TABLE[name]
    assert row.help[0].islower()
    assert (row.least is None) == (row.kind is not float)
    assert row.kind is not float or row.most is not None
    validate_sampling(SamplingParams(**{name: row.example}), vocab_size=VOCAB)


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_has_a_neutral_value_that_is_not_its_example(name: str) -> None:
    assert FIELDS[name].has_presence
    neutral = getattr(NEUTRAL, name)
    assert type(neutral) is TABLE[name].kind is type(EXAMPLES[name])
    assert neutral != EXAMPLES[name]
    validate_sampling(SamplingParams(**{name: neutral}), vocab_size=VOCAB)


def test_a_model_may_set_defaults_of_optional_fields_alone() -> None:
    assert all(FIELDS[name].has_presence for name in BY_MODEL)


@pytest.mark.parametrize(("name", "value", "is_allowed"), list(edges()))
def test_each_range_ends_where_the_table_says(name: str, value: float, is_allowed: bool) -> None:
    params: Any = SamplingParams(**{name: value})  # type: ignore[arg-type]
    if is_allowed:
        validate_sampling(params, vocab_size=VOCAB)
        return
    with pytest.raises(RequestRefused) as caught:
        validate_sampling(params, vocab_size=VOCAB)
    assert caught.value.field == f"sampling.{name}"

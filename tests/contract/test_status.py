"""Errors keep all their fields on the wire."""

from dataclasses import dataclass

import pytest

from trunkline import status
from trunkline.errors import _BY_REASON, TrunklineError
from trunkline.status import RequestRefused, context_exceeded, deadline_exceeded, invalid, no_worker
from trunkline.v1.generation_pb2 import RequestError

REASONS = {value for name, value in vars(status).items() if name == value}


@dataclass(frozen=True)
class Row:
    code: int
    reason: str
    message: str
    field: str
    retry_delay_ms: int


def row(refused: RequestRefused) -> Row:
    return Row(refused.code, refused.reason, refused.message, refused.field, refused.retry_delay_ms)


@pytest.mark.parametrize(
    "refused",
    [invalid("sampling.top_p", "no"), context_exceeded("long"), no_worker("gone", 250), deadline_exceeded()],
    ids=lambda refused: refused.reason,
)
def test_a_refusal_survives_the_session_stream(refused: RequestRefused) -> None:
    wire = RequestError.FromString(refused.to_proto().SerializeToString())
    assert row(RequestRefused.from_proto(wire)) == row(refused)


def test_every_reason_has_an_exception_of_the_client() -> None:
    assert len(REASONS) == 13
    assert set(_BY_REASON) == REASONS
    assert all(issubclass(kind, TrunklineError) for kind in _BY_REASON.values())

"""The metadata of calls, and the names of the contract's enum values."""

import pytest

from trunkline.names import SESSION_KEY, TENANT_KEY, finish_name, grammar_digest, lane_name, only_value
from trunkline.status import INVALID_REQUEST, RequestRefused
from trunkline.v1.generation_pb2 import FinishReason, Lane
from trunkline.v1.worker_pb2 import Grammar, GrammarKind
from trunkline.validation import (
    GRAMMAR_KINDS,
    LANES,
    MAX_SESSION_BYTES,
    MAX_TENANT_BYTES,
    session_problem,
    tenant_problem,
)


def test_a_key_has_one_value_or_none_and_a_second_one_is_refused_by_its_name() -> None:
    metadata = ((TENANT_KEY, "acme"), ("traceparent", "00-1"), ("traceparent", "00-2"))
    assert only_value(metadata, TENANT_KEY) == "acme"
    assert only_value(metadata, SESSION_KEY) == only_value(None, SESSION_KEY) == ""
    with pytest.raises(RequestRefused, match="x-trunkline-tenant: is given more than once") as refused:
        only_value((*metadata, (TENANT_KEY, "acme")), TENANT_KEY)
    assert (refused.value.reason, refused.value.field) == (INVALID_REQUEST, TENANT_KEY)


def test_tenants_and_sessions_are_called_what_can_travel_in_metadata() -> None:
    for problem, most in ((tenant_problem, MAX_TENANT_BYTES), (session_problem, MAX_SESSION_BYTES)):
        for good in ("", "acme", "a b/c", "x" * most):
            assert problem(good) is None
        for bad in ("x" * (most + 1), "müller", "a\nb", "a\0"):
            assert problem(bad) == f"must be at most {most} bytes of printable ASCII"


def test_a_grammar_is_named_by_its_kind_and_text() -> None:
    schema = Grammar(kind=GrammarKind.GRAMMAR_KIND_JSON_SCHEMA, text='{"title": "ü"}', digest=b"is left out")
    assert grammar_digest(schema).hex() == "00e51232a1ea6703d9c285642f3538bf8002fd68f5d0a5ee67d6d14c14955e9a"
    schema.kind = GrammarKind.GRAMMAR_KIND_REGEX
    assert grammar_digest(schema).hex()[:8] == "4169d1b1"
    assert list(GRAMMAR_KINDS) == ["json_schema", "regex", "ebnf", "lark", "choice", "structural_tag"]


def test_lanes_and_finish_reasons_have_the_names_that_people_use() -> None:
    assert {name: lane_name(lane) for name, lane in LANES.items()} == {name: name for name in LANES}
    assert list(LANES) == ["interactive", "standard", "batch"]
    assert lane_name(Lane.LANE_BATCH) == "batch"
    assert finish_name(FinishReason.FINISH_REASON_STOP) == "stop"

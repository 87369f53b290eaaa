"""Tenants and lanes at the edge."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.router.cluster import Cluster, cluster, refusal, until
from tests.router.fake_worker import FakeWorker
from trunkline.status import RequestRefused, no_worker
from trunkline.v1.fleet_pb2 import ExplainRouteRequest
from trunkline.v1.generation_pb2 import Lane
from trunkline.v1.inference_pb2 import GenerateRequest, TokenIds
from trunkline.validation import validate_scheduling
from trunkline_router.access.access import Access, Caller, Scheduling, Tenant, Tenants
from trunkline_router.access.tenants_file import TERMS, TenantsError, read_tenants

TENANTS = Tenants({"acme": Tenant(3.0, Lane.LANE_STANDARD)})


def named(tenants: Tenants, name: str) -> Caller:
    """The caller of a call that names a tenant, at a router that trusts its callers."""
    return Access(tenants, salt_key=b"fleet").caller((("x-trunkline-tenant", name),))


def scheduling(tenants: Tenants, name: str) -> Scheduling:
    """Of a request for the interactive lane."""
    return named(tenants, name).scheduling(Lane.LANE_INTERACTIVE)


def test_a_tenant_may_go_lower_than_its_cap_but_not_higher() -> None:
    acme = TENANTS.terms("acme")
    asked = (Lane.LANE_UNSPECIFIED, Lane.LANE_INTERACTIVE, Lane.LANE_STANDARD, Lane.LANE_BATCH)
    assert [acme.lane(lane) for lane in asked] == [2, 2, 2, 3]
    granted = Tenant(cap=Lane.LANE_INTERACTIVE)
    assert [granted.lane(lane) for lane in asked] == [2, 1, 2, 3]


@pytest.mark.parametrize(
    ("text", "granted"),
    [
        ("{}", set()),
        ('{"acme": {"weight": 3}, "*": {"weight": 2}}', set()),
        ('{"acme": {"lane": "interactive"}}', {"acme"}),
        ('{"acme": {"lane": "interactive"}, "*": {"requests_per_minute": 9}}', {"acme"}),
        ('{"acme": {"lane": "standard"}, "*": {"lane": "interactive"}}', {"else", ""}),
        ('{"acme": {}, "*": {"lane": "interactive"}}', {"else", ""}),
        ('{"": {"lane": "interactive"}, "*": {"lane": "batch"}}', {""}),
    ],
)
def test_the_interactive_lane_has_to_be_granted(tmp_path: Path, text: str, granted: set[str]) -> None:
    path = tmp_path / "tenants.json"
    path.write_text(text)
    tenants = read_tenants(str(path))
    for name in ("acme", "else", ""):
        has = scheduling(tenants, name).lane
        assert (has == Lane.LANE_INTERACTIVE) == (name in granted), name
    for name in ("acme", "else", ""):
        assert scheduling(Tenants(), name).lane == Lane.LANE_STANDARD


def test_a_tenants_file_is_read_with_a_rule_for_everybody_else(tmp_path: Path) -> None:
    path = tmp_path / "tenants.json"
    path.write_text('{"acme": {"weight": 3, "lane": "standard"}, "*": {"lane": "batch"}}')
    tenants = read_tenants(str(path))
    assert tenants.terms("acme") == Tenant(3.0, Lane.LANE_STANDARD)
    assert tenants.terms("another") == Tenant(1.0, Lane.LANE_BATCH)
    assert read_tenants("").terms("x") == Tenant()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[]", "must be an object of tenants"),
        ("{", "not JSON"),
        ('{"a": {"weight": 0}}', "tenant 'a': weight 0 is not in [0.001, 1000]"),
        ('{"a": {"weight": true}}', "weight True"),
        ('{"a": {"lane": "express"}}', "lane 'express' is not one of interactive, standard, batch"),
        ('{"a": {"lane": ["batch"]}}', "lane ['batch'] is not one of"),
        ('{"a": {"wait": 1}}', "tenant 'a': 'wait' is not known; allowed: weight, lane, requests_per_minute"),
        ('{"a": 3}', "tenant 'a': must be an object; allowed: weight, lane, requests_per_minute"),
        ('{"a": {"weight": NaN}}', "NaN is not a number of JSON"),
        ('{"a": {"weight": 1e999}}', "weight inf is not in [0.001, 1000]"),
        ('{"a": {"weight": 1001}}', "weight 1001 is not in [0.001, 1000]"),
        ('{"a": {"weight": "3"}}', "weight '3' is not in"),
        ('{"a": {"requests_per_minute": 0}}', "tenant 'a': requests_per_minute 0 is not a whole number in [1, 10"),
        ('{"a": {"tokens_per_minute": 1.5}}', "tokens_per_minute 1.5 is not a whole number"),
        ('{"a": {"tokens_in_flight": true}}', "tokens_in_flight True is not a whole number"),
        ('{"a": {"tokens_in_flight": 1000000000001}}', "tokens_in_flight 1000000000001 is not a whole number"),
        ('{"a": {"tokens_per_minute": null}}', "tokens_per_minute None is not a whole number"),
        ('{"a": {}, "a": {"weight": 2}}', "'a' appears twice"),
        ('{"\u00fc": {}}', "the name must be at most 128 bytes of printable ASCII"),
        ("[" * 100_000, "not JSON"),
        ('{"a": {"cache_group": null}}', "tenant 'a': cache_group None must be a name"),
        ('{"a": {"cache_group": "a\\nb"}}', "cache_group 'a\\nb' must be at most 128 bytes of printable ASCII"),
    ],
)
def test_a_tenants_file_that_makes_no_sense_is_named_in_one_line(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "tenants.json"
    path.write_text(text)
    with pytest.raises(TenantsError) as caught:
        read_tenants(str(path))
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)
    with pytest.raises(TenantsError, match="No such file"):
        read_tenants(str(tmp_path / "nowhere"))


@pytest.mark.parametrize(
    ("lane", "tenant", "weight", "field"),
    [
        (4, "", 1.0, "lane"),
        (-1, "", 1.0, "lane"),
        (1, "x" * 129, 1.0, "tenant"),
        (1, "a\nb", 1.0, "tenant"),
        (1, "m\u00fcller", 1.0, "tenant"),
        (1, "", 0.0009, "tenant_weight"),
        (1, "", 1000.1, "tenant_weight"),
        (1, "", -1.0, "tenant_weight"),
        (1, "", math.nan, "tenant_weight"),
        (1, "", math.inf, "tenant_weight"),
    ],
)
def test_what_a_worker_is_told_of_scheduling_is_checked_by_name(
    lane: int, tenant: str, weight: float, field: str
) -> None:
    with pytest.raises(RequestRefused) as caught:
        validate_scheduling(lane, tenant, weight)
    assert (caught.value.reason, caught.value.field) == ("INVALID_REQUEST", field)


def test_the_limits_of_scheduling_themselves_are_allowed() -> None:
    for lane in range(4):
        validate_scheduling(lane, "x" * 128, 0.001)
        validate_scheduling(lane, "", 1000.0)
        validate_scheduling(lane, "team a/b", 0.0)


def test_every_named_tenant_is_kept_apart_unless_a_group_says_otherwise() -> None:
    pair, shared = Tenant(cache_group="pair"), Tenant(cache_group="")
    tenants = Tenants({"a": Tenant(), "b": pair, "c": pair, "d": shared, "pair": Tenant()})
    salts = {name: named(tenants, name).cache_salt() for name in ("", "a", "b", "c", "d", "e", "pair")}
    assert salts[""] == salts["d"] == b"", "as where there are no tenants"
    assert salts["b"] == salts["c"]
    assert len({salts[name] for name in ("", "a", "b", "e", "pair")}) == 5
    all_shared = Tenants(otherwise=shared)
    assert {named(all_shared, name).cache_salt() for name in ("", "a", "b")} == {b""}


async def test_a_tenants_prefixes_are_sought_and_kept_under_its_own_salt_also_across_a_failover() -> None:
    workers = [FakeWorker(name, answer=None) for name in ("a", "b")]
    tenants = Tenants({"left": Tenant(cache_group="pair"), "right": Tenant(cache_group="pair")})
    named_salt = Access(tenants).caller((("x-trunkline-tenant", "right"),)).cache_salt()
    prompt = list(range(5, 45))

    def matched(router: Cluster, tenant: str) -> Any:
        asked = ExplainRouteRequest(request=GenerateRequest(token_ids=TokenIds(ids=prompt)))
        return router.fleet.ExplainRoute(asked, metadata=(("x-trunkline-tenant", tenant),))

    async with cluster(*workers, tenants=tenants) as router:
        request = GenerateRequest(token_ids=TokenIds(ids=prompt))
        call = router.stub.Generate(request, metadata=(("x-trunkline-tenant", "left"),))
        await until(lambda: any(not worker.arrived.empty() for worker in workers))
        first = next(worker for worker in workers if not worker.arrived.empty())
        choice = first.arrived.get_nowait()
        choice.tokens(1)
        await call.read()
        await until(lambda: len(router.connected(workers.index(first)).blocks) > 0)
        for tenant, is_known in (("left", True), ("right", True), ("other", False), ("", False)):
            candidates = (await matched(router, tenant)).candidates
            assert (max(candidate.matched_tokens for candidate in candidates) > 0) == is_known, tenant
        choice.fail(no_worker("it drains"))
        other = next(worker for worker in workers if worker is not first)
        resumed = await other.arrived.get()
        assert resumed.submit.cache_salt == choice.submit.cache_salt == named_salt
        call.cancel()


async def test_lane_tenant_and_weight_reach_the_worker_and_the_lane_the_client() -> None:
    worker = FakeWorker("a")
    async with cluster(worker, tenants=TENANTS) as router:
        request = GenerateRequest(token_ids=TokenIds(ids=[5, 6, 7]), lane=Lane.LANE_INTERACTIVE)
        call = router.stub.Generate(request, metadata=(("x-trunkline-tenant", "acme"),))
        responses = [response async for response in call]
        await router.answer([5, 6, 7])
    submit, plain = worker.submits
    assert (submit.lane, submit.tenant, submit.tenant_weight) == (Lane.LANE_STANDARD, "acme", 3.0)
    assert (plain.lane, plain.tenant, plain.tenant_weight) == (Lane.LANE_STANDARD, "", 1.0)
    assert responses[0].prompt.lane == Lane.LANE_STANDARD


async def test_a_lane_or_tenant_that_makes_no_sense_is_refused_by_name() -> None:
    worker = FakeWorker("a")
    async with cluster(worker) as router:
        refused = await refusal(router.generate([5, 6, 7], lane=17))
        assert (refused.reason, refused.field) == ("INVALID_REQUEST", "lane")
        request = GenerateRequest(token_ids=TokenIds(ids=[5, 6, 7]))
        for metadata in (
            (("x-trunkline-tenant", "x" * 129),),
            (("x-trunkline-tenant", "acme"), ("x-trunkline-tenant", "other")),
        ):
            refused = await refusal(router.stub.Generate(request, metadata=metadata))
            assert (refused.reason, refused.field) == ("INVALID_REQUEST", "x-trunkline-tenant")
    assert not worker.submits


NAMES = st.sampled_from(["a", "*", "", "weight", "lane", "ü", "x" * 129, "a\nb"])
VALUES = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        st.text(max_size=4),
        st.sampled_from(["interactive", "batch", "standard", "STANDARD", 1, 3.0, 10**13, "1"]),
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(TERMS) | NAMES, inner, max_size=4),
    max_leaves=12,
)


def read_or_refused(path: Path) -> Tenants | str:
    try:
        return read_tenants(str(path))
    except TenantsError as error:
        return str(error)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.dictionaries(NAMES, st.dictionaries(st.sampled_from(TERMS), VALUES, max_size=5) | VALUES, max_size=4) | VALUES
)
def test_any_tenants_file_is_read_or_refused_in_one_line(tmp_path: Path, entries: Any) -> None:
    path = tmp_path / "tenants.json"
    path.write_text(json.dumps(entries))
    tenants = read_or_refused(path)
    if isinstance(tenants, str):
        assert tenants.startswith(f"--tenants={path}: ")
        assert "\n" not in tenants
        return
    for name in ("a", "", "else"):
        scheduled = scheduling(tenants, name)
        granted = entries.get(name, entries.get("*", {})).get("lane", "standard")
        assert scheduled.lane_name == granted
        assert 0.001 <= scheduled.weight <= 1000


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=40) | st.binary(max_size=20).map(lambda junk: b'{"a": {"weight": ' + junk + b"}}"))
def test_a_tenants_file_of_any_bytes_is_read_or_refused_in_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "tenants.json"
    path.write_bytes(content)
    assert "\n" not in str(read_or_refused(path))

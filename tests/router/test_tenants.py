"""Tenants and lanes at the edge."""

from pathlib import Path

import pytest

from tests.router.cluster import cluster, refusal
from tests.router.fake_worker import FakeWorker
from trunkline.v1.generation_pb2 import Lane
from trunkline.v1.inference_pb2 import GenerateRequest, TokenIds
from trunkline_router.tenants import Tenant, Tenants, TenantsError, read_tenants

TENANTS = Tenants({"acme": Tenant(3.0, Lane.LANE_STANDARD)})


def test_a_tenant_may_go_lower_than_its_cap_but_not_higher() -> None:
    acme = TENANTS.terms("acme")
    asked = (Lane.LANE_UNSPECIFIED, Lane.LANE_INTERACTIVE, Lane.LANE_STANDARD, Lane.LANE_BATCH)
    assert [acme.lane(lane) for lane in asked] == [2, 2, 2, 3]
    assert [TENANTS.terms("else").lane(lane) for lane in asked] == [2, 1, 2, 3]


def test_a_tenants_file_is_read_with_a_rule_for_everybody_else(tmp_path: Path) -> None:
    path = tmp_path / "tenants.json"
    path.write_text('{"acme": {"weight": 3, "lane": "standard"}, "*": {"lane": "batch"}}')
    tenants = read_tenants(str(path))
    assert tenants.terms("acme") == Tenant(3.0, Lane.LANE_STANDARD)
    assert tenants.terms("somebody") == Tenant(1.0, Lane.LANE_BATCH)
    assert read_tenants("").terms("x") == Tenant()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[]", "must be an object of tenants"),
        ("{", "not JSON"),
        ('{"a": {"weight": 0}}', "tenant 'a': weight 0 is not in [0.001, 1000]"),
        ('{"a": {"weight": true}}', "weight True"),
        ('{"a": {"lane": "express"}}', "lane 'express' is not one of interactive, standard, batch"),
        ('{"a": {"wait": 1}}', "must be an object with weight and lane"),
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


def test_python_clients_name_lanes_by_word() -> None:
    from trunkline.client import _lane

    assert [_lane(name) for name in (None, "interactive", "standard", "batch")] == [0, 1, 2, 3]
    for bad in ("express", "unspecified"):
        with pytest.raises(ValueError, match="is not a lane"):
            _lane(bad)


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
        call = router.stub.Generate(request, metadata=(("x-trunkline-tenant", "x" * 200),))
        assert "x-trunkline-tenant" in (await refusal(call)).message
    assert not worker.submits

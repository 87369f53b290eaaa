"""What is told of requests that were refused, over real gRPC: by which stage, and for which field."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.router.cluster import Cluster, cluster, refusal
from tests.router.fake_worker import FakeChoice, FakeWorker
from trunkline.status import invalid
from trunkline.v1.fleet_pb2 import GetRequestRequest, GetRequestResponse
from trunkline.v1.generation_pb2 import SamplingParams
from trunkline.v1.inference_pb2 import ChatMessages, GenerateRequest, TokenIds
from trunkline_router.access.access import Tenant, Tenants
from trunkline_router.quotas.quota import Quotas
from trunkline_router.record.request_record import CHECKS, MODEL, PLACEMENT, QUOTAS, TOKENIZER, WORKER
from trunkline_router.request.failover import FailoverLimits

LIMITED = Tenants({"limited": Tenant(quotas=Quotas(requests_per_minute=1))})


@pytest.fixture
async def router() -> AsyncIterator[Cluster]:
    worker = FakeWorker("a", context_length=64)
    async with cluster(worker, tenants=LIMITED, failover=FailoverLimits(patience_s=0.0)) as router:
        yield router


async def told(router: Cluster, request_id: str) -> GetRequestResponse:
    found: GetRequestResponse = await router.fleet.GetRequest(GetRequestRequest(request_id=request_id))
    return found


REFUSED: dict[str, tuple[dict[str, Any], tuple[str, str, str]]] = {
    "a bad parameter": (
        {"text": "hi", "sampling": SamplingParams(temperature=-1.0)},
        ("INVALID_REQUEST", CHECKS, "sampling.temperature"),
    ),
    "a text that cannot fit": ({"text": "hi " * 9000}, ("CONTEXT_LENGTH_EXCEEDED", CHECKS, "prompt")),
    "too many tokens": ({"token_ids": TokenIds(ids=[1] * 64)}, ("CONTEXT_LENGTH_EXCEEDED", CHECKS, "prompt")),
    "too many output tokens": (
        {"text": "hi", "sampling": SamplingParams(max_tokens=64)},
        ("CONTEXT_LENGTH_EXCEEDED", CHECKS, "sampling.max_tokens"),
    ),
    "an unknown model": ({"model": "none", "text": "hi"}, ("MODEL_NOT_FOUND", MODEL, "model")),
    "an empty conversation": ({"chat": ChatMessages()}, ("INVALID_REQUEST", TOKENIZER, "chat")),
}


@pytest.mark.parametrize("why", REFUSED)
async def test_a_refused_request_tells_which_stage_refused_it_and_for_which_field(router: Cluster, why: str) -> None:
    fields, expected = REFUSED[why]
    request_id = why.replace(" ", "-")
    await refusal(router.stub.Generate(GenerateRequest(request_id=request_id, **fields)))
    summary = (await told(router, request_id)).summary
    assert (summary.outcome, summary.refused_by, summary.refused_field) == expected
    assert (summary.is_failed, summary.attempts) == (True, 0)


async def test_a_request_that_was_not_refused_names_no_stage(router: Cluster) -> None:
    await router.answer("hi", request_id="served")
    summary = (await told(router, "served")).summary
    assert (summary.refused_by, summary.refused_field) == ("", "")


async def test_a_used_up_quota_refuses_before_anything_else(router: Cluster) -> None:
    limited = (("x-trunkline-tenant", "limited"),)
    await router.stub.Generate(GenerateRequest(text="hi"), metadata=limited).read()
    await refusal(router.stub.Generate(GenerateRequest(text="hi", request_id="second"), metadata=limited))
    summary = (await told(router, "second")).summary
    assert (summary.outcome, summary.refused_by) == ("QUOTA_EXCEEDED", QUOTAS)


async def began(worker: FakeWorker, router: Cluster, request_id: str) -> tuple[FakeChoice, "asyncio.Task[Any]"]:
    call = asyncio.create_task(refusal(router.generate([1, 2], request_id=request_id)))
    return await worker.arrived.get(), call


async def test_a_worker_that_refuses_is_the_stage_and_one_that_is_lost_leaves_none_to_choose() -> None:
    worker = FakeWorker("a", answer=None)
    async with cluster(worker, failover=FailoverLimits(patience_s=0.0)) as router:
        choice, call = await began(worker, router, "refused")
        choice.fail(invalid("sampling.seed", "is odd"))
        await call
        summary = (await told(router, "refused")).summary
        assert (summary.outcome, summary.refused_by) == ("INVALID_REQUEST", WORKER)
        assert summary.refused_field == "sampling.seed"
        choice, call = await began(worker, router, "lost")
        choice.tokens(2)
        await worker.die()
        await call
        summary = (await told(router, "lost")).summary
        assert (summary.outcome, summary.refused_by, summary.attempts) == ("NO_WORKER", PLACEMENT, 1)


async def test_a_search_for_a_models_worker_is_time_without_a_worker() -> None:
    worker = FakeWorker("a")
    async with cluster(worker) as router:
        await worker.die()
        await router.until_workers(False)
        await refusal(router.generate("hi", model="tiny", request_id="searched"))
        story = await told(router, "searched")
        assert (story.summary.outcome, story.summary.refused_by) == ("NO_WORKER", MODEL)
        assert story.summary.cause == "placement"

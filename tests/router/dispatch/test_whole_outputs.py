"""Requests whose output is a vector or a score go the way of all requests: placed, retried, charged, answered."""

from array import array
from typing import Any

import pytest

from tests.router.asked_work import Ask
from tests.router.cluster import cluster, refusal
from tests.router.failover_rig import DIED, PROMPT, dies, first_of
from tests.router.fake_worker import FakeWorker
from tests.router.tokenizer_files import VOCAB_SIZE
from trunkline.status import CONTEXT_LENGTH_EXCEEDED, INVALID_REQUEST, QUOTA_EXCEEDED
from trunkline.v1.generation_pb2 import SamplingParams, Score, Vector
from trunkline.v1.worker_pb2 import Capability, OutputKind, Task, Work
from trunkline_router.access.access import Tenant, Tenants
from trunkline_router.quotas.quota import Quotas

KINDS: dict[str, tuple["Task.ValueType", "Capability.ValueType", Work, dict[str, Any]]] = {
    "vector": (
        Task.TASK_EMBED,
        Capability.CAPABILITY_VECTORS,
        Work(output=OutputKind.OUTPUT_KIND_VECTOR),
        {"vector": Vector(values=array("f", [0.5, -2.0]).tobytes())},
    ),
    "score": (
        Task.TASK_SCORE,
        Capability.CAPABILITY_SCORES,
        Work(output=OutputKind.OUTPUT_KIND_SCORE),
        {"score": Score(values=[0.25])},
    ),
}
NO_TOKENS = SamplingParams(max_tokens=0)


def fakes(kind: str, *names: str, **settings: Any) -> list[FakeWorker]:
    task, capability, _, _ = KINDS[kind]
    return [FakeWorker(name, answer=None, task=task, capabilities=[capability], **settings) for name in names]


@pytest.mark.parametrize("kind", KINDS)
async def test_it_is_computed_again_elsewhere_if_its_worker_is_lost(kind: str, ask: Ask) -> None:
    _, _, work, output = KINDS[kind]
    workers = fakes(kind, "a", "b")
    ask(work)
    async with cluster(*workers) as router:
        call = router.generate(PROMPT, sampling=NO_TOKENS)
        lost = await first_of(workers)
        lost.fail(DIED)
        await dies(router, workers, lost.worker)
        (await first_of([worker for worker in workers if worker is not lost.worker])).whole(**output)
        (response,) = [response async for response in call]
    assert getattr(response, kind) == output[kind]
    assert response.usage.prompt_tokens == len(PROMPT)
    assert response.usage.completion_tokens == 0
    assert [len(worker.submits) for worker in workers] == [1, 1]


async def test_a_tenant_pays_for_the_prompt_alone(ask: Ask) -> None:
    _, _, work, output = KINDS["vector"]
    (worker,) = fakes("vector", "a")
    ask(work)
    tenants = Tenants(otherwise=Tenant(quotas=Quotas(tokens_per_minute=2 * len(PROMPT))))
    async with cluster(worker, tenants=tenants) as router:
        for _ in range(2):
            call = router.generate(PROMPT, sampling=NO_TOKENS)
            (await worker.arrived.get()).whole(**output)
            assert [response.HasField("vector") async for response in call] == [True]
        assert (await refusal(router.generate(PROMPT, sampling=NO_TOKENS))).reason == QUOTA_EXCEEDED


async def test_its_prompt_may_fill_the_context_and_it_has_no_token_and_one_choice(ask: Ask) -> None:
    _, _, work, output = KINDS["vector"]
    (worker,) = fakes("vector", "a", context_length=len(PROMPT))
    ask(work)
    async with cluster(worker) as router:
        call = router.generate(PROMPT, sampling=NO_TOKENS)
        (await worker.arrived.get()).whole(**output)
        assert [response.HasField("vector") async for response in call] == [True]
        for fields, reason, field in (
            ({"sampling": SamplingParams(max_tokens=1)}, INVALID_REQUEST, "sampling.max_tokens"),
            ({}, INVALID_REQUEST, "sampling.max_tokens"),
            ({"sampling": NO_TOKENS, "n": 2}, INVALID_REQUEST, "n"),
        ):
            refused = await refusal(router.generate(PROMPT, **fields))
            assert (refused.reason, refused.field) == (reason, field)
        refused = await refusal(router.generate([*PROMPT, 1], sampling=NO_TOKENS))
        assert refused.reason == CONTEXT_LENGTH_EXCEEDED
        for wrong in (-1, VOCAB_SIZE):
            refused = await refusal(router.generate([*PROMPT[:-1], wrong], sampling=NO_TOKENS))
            assert (refused.reason, refused.field) == (INVALID_REQUEST, "token_ids")
    assert len(worker.submits) == 1

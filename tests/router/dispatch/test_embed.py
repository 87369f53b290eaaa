"""Calls for many vectors or scores: one request, whose inputs go to one worker, and on to another one if it is lost."""

import asyncio
from array import array
from collections.abc import Iterable, Sequence
from typing import Any

import grpc
import pytest

from tests.router.cluster import SERVICE, Cluster, cluster, refusal, until
from tests.router.failover_rig import DIED, dies, rest
from tests.router.fake_worker import WORKER_DRAINS, FakeChoice, FakeWorker, vector_of
from tests.router.tokenizer_files import VOCAB_SIZE
from trunkline.status import (
    CODE_RESOURCE_EXHAUSTED,
    CONTEXT_LENGTH_EXCEEDED,
    INVALID_REQUEST,
    OVERLOADED,
    QUARANTINED,
    QUOTA_EXCEEDED,
    RequestRefused,
)
from trunkline.v1.generation_pb2 import Score, Vector
from trunkline.v1.inference_pb2 import EmbedRequest, EmbedResponse, Input, ScoreRequest, ScoreResponse, TokenIds
from trunkline.v1.worker_pb2 import Capability, PoolingModel, Task
from trunkline_router.access.access import Tenant, Tenants
from trunkline_router.quotas.quota import Quotas
from trunkline_router.request.input_window import MOST_AT_WORKER
from trunkline_router.request.inputs import MAX_INPUTS
from trunkline_runtime.channel import open_channel

MODEL = PoolingModel(dimensions=2, prompts={"query": "q: "}, default_prompt="")
EMBEDS: dict[str, Any] = {"task": Task.TASK_EMBED, "capabilities": [Capability.CAPABILITY_VECTORS], "pooling": MODEL}
SCORES: dict[str, Any] = {
    "task": Task.TASK_SCORE,
    "capabilities": [Capability.CAPABILITY_SCORES],
    "pooling": PoolingModel(labels=["s"]),
}


def fakes(*names: str, **fields: Any) -> list[FakeWorker]:
    return [FakeWorker(name, answer=None, **{**EMBEDS, **fields}) for name in names]


def token_inputs(count: int) -> list[Input]:
    return [Input(token_ids=TokenIds(ids=[index % VOCAB_SIZE, 7])) for index in range(count)]


def embed(router: Cluster, inputs: Iterable[Input], **fields: Any) -> Any:
    return router.stub.Embed(EmbedRequest(inputs=inputs, **fields), timeout=60.0)


def vector(prompt: Sequence[int]) -> Vector:
    return Vector(values=array("f", vector_of(prompt)).tobytes())


def answer(choice: FakeChoice) -> None:
    choice.whole(vector=vector(choice.submit.prompt_token_ids))


async def serve(worker: FakeWorker, most: int | None = None) -> None:
    """Answers choices as they come, or so many of them."""
    while most is None or most > 0:
        answer(await worker.arrived.get())
        most = None if most is None else most - 1


async def vectors(call: Any) -> tuple[dict[int, Vector], list[EmbedResponse]]:
    """Returns the vectors by input, each of which came once, and all responses."""
    found: dict[int, Vector] = {}
    responses = await rest(call)
    for response in responses:
        for embedding in response.embeddings:
            assert embedding.index not in found
            found[embedding.index] = embedding.vector
    return found, responses


async def test_a_call_is_one_request_and_each_input_is_computed_once() -> None:
    workers = fakes("a", "b")
    tenants = Tenants(otherwise=Tenant(quotas=Quotas(requests_per_minute=1)))
    inputs = token_inputs(MAX_INPUTS)
    async with cluster(*workers, tenants=tenants) as router:
        serving = [asyncio.create_task(serve(worker)) for worker in workers]
        found, responses = await vectors(embed(router, inputs))
        assert found == {index: vector(one.token_ids.ids) for index, one in enumerate(inputs)}
        assert sorted(len(worker.submits) for worker in workers) == [0, MAX_INPUTS]
        assert responses[0].prompt.prompt_tokens == responses[-1].usage.prompt_tokens == 2 * MAX_INPUTS
        assert [response.HasField("usage") for response in responses].count(True) == 1
        assert (await refusal(embed(router, inputs[:1]))).reason == QUOTA_EXCEEDED
        for task in serving:
            task.cancel()


async def test_only_inputs_without_an_answer_go_to_another_worker() -> None:
    workers = fakes("a", "b")
    async with cluster(*workers) as router:
        call = embed(router, token_inputs(600))
        await until(lambda: any(worker.submits for worker in workers))
        first = next(worker for worker in workers if worker.submits)
        (other,) = (worker for worker in workers if worker is not first)
        await serve(first, 300)
        had = [embedding.index for _ in range(300) for embedding in (await call.read()).embeddings]
        await first.die()
        serving = asyncio.create_task(serve(other))
        found, responses = await vectors(call)
        serving.cancel()
    assert sorted([*had, *found]) == list(range(600))
    assert sorted(submit.choice for submit in other.submits) == sorted(found)
    assert responses[-1].usage.resumptions == 1


async def test_the_inputs_that_are_not_answered_stay_in_the_load_of_their_worker() -> None:
    workers = fakes("a", "b")
    async with cluster(*workers) as router:
        call = embed(router, token_inputs(8))
        await until(lambda: any(len(worker.submits) == 8 for worker in workers))
        place = next(place for place, worker in enumerate(workers) if worker.submits)
        first, other = router.connected(place), router.connected(1 - place)
        assert first.queued_tokens == 16
        await serve(workers[place], 3)
        await call.read()
        await until(lambda: first.queued_tokens == 10)
        await workers[place].die()
        await until(lambda: other.queued_tokens == 10)
        await serve(workers[1 - place], 5)
        await rest(call)
        await until(lambda: (other.queued_tokens, other.open_choices) == (0, 0))


async def test_a_draining_worker_hands_the_rest_of_a_call_over() -> None:
    workers = fakes("a", "b")
    async with cluster(*workers) as router:
        call = asyncio.create_task(vectors(embed(router, token_inputs(8))))
        await until(lambda: any(len(worker.submits) == 8 for worker in workers))
        first = next(worker for worker in workers if worker.submits)
        (other,) = (worker for worker in workers if worker is not first)
        await serve(first, 5)
        (await first.arrived.get()).fail(WORKER_DRAINS)
        serving = asyncio.create_task(serve(other))
        found, _ = await call
        serving.cancel()
    assert len(found) == 8
    assert [submit.choice for submit in other.submits] == [5, 6, 7]


async def test_an_input_that_kills_workers_is_found_among_the_others_and_refused() -> None:
    workers = fakes("a", "b", "c")
    inputs = token_inputs(6)
    async with cluster(*workers) as router:
        call = asyncio.create_task(refusal(embed(router, inputs)))
        await until(lambda: any(len(worker.submits) == 6 for worker in workers))
        first = next(worker for worker in workers if worker.submits)
        await serve(first, 1)
        for _ in range(5):
            (await first.arrived.get()).fail(DIED, suspect=True)
        await dies(router, workers, first)
        left = [worker for worker in workers if worker is not first]
        await until(lambda: any(worker.submits for worker in left))
        second = next(worker for worker in left if worker.submits)
        for index in (1, 2):
            await until(lambda: not second.arrived.empty())
            assert [submit.choice for submit in second.submits] == list(range(1, index + 1)), "one by one"
            answer(await second.arrived.get())
        (await second.arrived.get()).fail(DIED, suspect=True, sole_suspect=True)
        await dies(router, workers, second)
        refused = await call
        assert (refused.reason, "input 3 of this request" in refused.message) == (QUARANTINED, True)
        (third,) = (worker for worker in left if worker is not second)
        serving = asyncio.create_task(serve(third))
        found, _ = await vectors(embed(router, inputs[:3]))
        assert len(found) == 3, "the others are harmless"
        refused = await refusal(embed(router, inputs[3:]))
        assert (refused.reason, "input 0 of this request" in refused.message) == (QUARANTINED, True)
        serving.cancel()


async def test_a_suspect_whose_inputs_prove_harmless_goes_on_with_many_at_a_time() -> None:
    workers = fakes("a", "b")
    async with cluster(*workers) as router:
        call = asyncio.create_task(vectors(embed(router, token_inputs(MOST_AT_WORKER + 9))))
        await until(lambda: any(len(worker.submits) == MOST_AT_WORKER for worker in workers))
        first = next(worker for worker in workers if worker.submits)
        (other,) = (worker for worker in workers if worker is not first)
        await serve(first, MOST_AT_WORKER - 2)
        await until(lambda: len(first.submits) == MOST_AT_WORKER + 9)
        while not first.arrived.empty():
            (await first.arrived.get()).fail(DIED, suspect=True)
        await dies(router, workers, first)
        serving = asyncio.create_task(serve(other))
        found, _ = await call
        serving.cancel()
    assert len(found) == MOST_AT_WORKER + 9
    assert [submit.suspect for submit in other.submits] == [True] * 11


async def test_a_full_worker_gets_fewer_inputs_at_a_time() -> None:
    (worker,) = fakes("a")
    full = RequestRefused(CODE_RESOURCE_EXHAUSTED, OVERLOADED, "full", retry_delay_ms=1)
    async with cluster(worker) as router:
        call = asyncio.create_task(vectors(embed(router, token_inputs(MAX_INPUTS))))
        await until(lambda: len(worker.submits) == MOST_AT_WORKER)
        await serve(worker, 1)
        (await worker.arrived.get()).fail(full)
        await until(lambda: len(worker.submits) == MOST_AT_WORKER + MOST_AT_WORKER // 2)
        assert worker.num_running == MOST_AT_WORKER // 2, "those that were there are aborted"
        while not worker.arrived.empty():
            await worker.arrived.get()
        for choice in list(worker._running.values()):
            answer(choice)
        serving = asyncio.create_task(serve(worker))
        assert len((await call)[0]) == MAX_INPUTS
        serving.cancel()


async def test_workers_with_other_prompts_get_no_requests() -> None:
    others = fakes("c", pooling=PoolingModel(dimensions=2, prompts={"query": "other: "}))
    async with cluster(*fakes("a", "b"), *others) as router:
        await until(lambda: bool(router.inference.pools.models()) and bool(router.connected(2).aside))
        assert "its prompts, dimensions or labels differ from those at 2 of" in router.connected(2).aside


async def test_the_client_that_goes_takes_all_its_inputs_along() -> None:
    (worker,) = fakes("a")
    async with cluster(worker) as router:
        call = embed(router, token_inputs(5))
        await until(lambda: len(worker.submits) == 5)
        answer(await worker.arrived.get())
        await call.read()
        call.cancel()
        await until(lambda: len(worker.aborted) == 4)


async def test_a_call_that_is_cancelled_is_charged_for_the_inputs_that_its_worker_got() -> None:
    (worker,) = fakes("a")
    tenants = Tenants(otherwise=Tenant(quotas=Quotas(tokens_per_minute=2 * MAX_INPUTS + 2 * MOST_AT_WORKER)))
    async with cluster(worker, tenants=tenants) as router:
        call = embed(router, token_inputs(MAX_INPUTS))
        await until(lambda: len(worker.submits) == MOST_AT_WORKER)
        call.cancel()
        await until(lambda: len(worker.aborted) == MOST_AT_WORKER)
        while not worker.arrived.empty():
            worker.arrived.get_nowait()
        serving = asyncio.create_task(serve(worker))
        assert len((await vectors(embed(router, token_inputs(MAX_INPUTS))))[0]) == MAX_INPUTS
        assert (await refusal(embed(router, token_inputs(MOST_AT_WORKER)))).reason == QUOTA_EXCEEDED
        serving.cancel()


async def test_a_deadline_ends_all_inputs_of_a_call() -> None:
    (worker,) = fakes("a")
    async with cluster(worker) as router:
        call = router.stub.Embed(EmbedRequest(inputs=token_inputs(5)), timeout=0.5)
        await until(lambda: len(worker.submits) == 5)
        assert all(0 < submit.timeout.ToNanoseconds() < 1e9 for submit in worker.submits)
        assert (await refusal(call)).code == grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: len(worker.aborted) == 5)


async def test_a_hostile_call_is_refused_before_it_is_parsed() -> None:
    (worker,) = fakes("a")
    message = EmbedRequest(inputs=[Input(text="a")]).SerializeToString() * 1_000_000
    async with cluster(worker) as router, open_channel(f"127.0.0.1:{router.port}") as channel:
        call: Any = channel.unary_stream(f"/{SERVICE}/Embed")
        refused = await refusal(call(message))
        assert (refused.reason, refused.field) == (INVALID_REQUEST, "inputs")
        assert "fields and entries" in refused.message
    assert not worker.submits


async def test_a_call_is_counted_once_and_has_no_time_per_output_token() -> None:
    worker = FakeWorker("a", **EMBEDS)
    async with cluster(worker) as router:
        await vectors(embed(router, token_inputs(7)))
        samples = [sample for family in router.counted.families() for sample in family.samples]
        found = {(sample.name, sample.labels.get("kind", "")): sample.value for sample in samples}
        assert found["trunkline_router_requests_total", ""] == 1
        assert found["trunkline_router_tokens_total", "prompt_computed"] == 14
        assert ("trunkline_router_tokens_total", "output") not in found
        for name in ("time_per_output_token", "time_to_first_token"):
            assert found.get((f"gen_ai_server_{name}_seconds_count", ""), 0) == 0
        operations = {sample.labels.get("gen_ai_operation_name") for sample in samples}
        assert "embeddings" in operations


async def test_texts_have_the_prompts_of_the_model() -> None:
    (worker,) = fakes("a")
    async with cluster(worker) as router:
        serving = asyncio.create_task(serve(worker))
        for fields, before in (({}, ""), ({"prompt_name": "query"}, "q: "), ({"prompt": "say "}, "say ")):
            await vectors(embed(router, [Input(text="hello there")], **fields))
            ids = await router.connected(0).tokenizer.encode(before + "hello there")
            assert list(worker.submits[-1].prompt_token_ids) == list(ids)
        serving.cancel()


@pytest.mark.parametrize("special", [False, True])
async def test_what_is_cut_off_is_told(special: bool) -> None:
    (worker,) = fakes("a", context_length=6)
    long = "one two three four five six seven eight nine"
    async with cluster(worker) as router:
        serving = asyncio.create_task(serve(worker))
        ids = list(await router.connected(0).tokenizer.encode(long))
        given = Input(text=long) if special else Input(token_ids=TokenIds(ids=ids))
        refused = await refusal(embed(router, [token_inputs(1)[0], given]))
        assert (refused.reason, refused.field) == (CONTEXT_LENGTH_EXCEEDED, "inputs[1]")
        for cut_to, num_left in ((0, 6), (4, 4)):
            _, responses = await vectors(embed(router, [*token_inputs(1), given], truncate_prompt_tokens=cut_to))
            assert list(responses[0].prompt.truncated_tokens) == [0, len(ids) - num_left]
            assert len(worker.submits[-1].prompt_token_ids) == num_left
        serving.cancel()


async def test_a_pair_of_texts_is_made_by_the_models_template_and_cut_within_the_document() -> None:
    template = "judge {instruction} : {query} ? {document} . yes or no"
    model = PoolingModel(labels=["relevance"], pair_template=template, default_instruction="relevance")
    (worker,) = fakes("a", **{**SCORES, "pooling": model})
    async with cluster(worker) as router:
        encode = router.connected(0).tokenizer.encode

        async def score(**fields: Any) -> list[ScoreResponse]:
            call = router.stub.Score(ScoreRequest(**fields), timeout=60.0)
            scored = asyncio.create_task(_scores(worker, len(fields["inputs"])))
            responses = [response async for response in call]
            await scored
            return responses

        responses = await score(queries=["{document}"], inputs=[Input(text="a red fox"), Input(text="{query}")])
        assert {one.index: one.score.values[0] for each in responses for one in each.scores} == {0: 0.0, 1: 0.5}
        for submit, document in zip(worker.submits, ("a red fox", "{query}"), strict=True):
            text = f"judge relevance : {{document}} ? {document} . yes or no"
            assert list(submit.prompt_token_ids) == list(await encode(text, special_tokens=False))
        document = "a b c d e f g h i j k l m n o p"
        await score(queries=["why"], inputs=[Input(text=document)], instruction="use", truncate_prompt_tokens=33)
        cut = list(worker.submits[-1].prompt_token_ids)
        assert cut == list(await encode("judge use : why ? a b . yes or no", special_tokens=False))


async def _scores(worker: FakeWorker, count: int) -> None:
    for _ in range(count):
        choice = await worker.arrived.get()
        choice.whole(score=Score(values=[choice.submit.choice / 2]))


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"inputs": []}, "inputs"),
        ({"inputs": token_inputs(MAX_INPUTS + 1)}, "inputs"),
        ({"inputs": [*token_inputs(1), Input(text="")]}, "inputs[1]"),
        ({"inputs": [Input()]}, "inputs[0]"),
        ({"inputs": [Input(token_ids=TokenIds(ids=[VOCAB_SIZE]))]}, "inputs[0]"),
        ({"dimensions": 3}, "dimensions"),
        ({"prompt_name": "document"}, "prompt_name"),
        ({"prompt_name": "query", "prompt": ""}, "prompt_name"),
        ({"truncate_prompt_tokens": 5000}, "truncate_prompt_tokens"),
    ],
)
async def test_a_wrong_field_is_named(fields: dict[str, Any], field: str) -> None:
    (worker,) = fakes("a")
    async with cluster(worker) as router:
        refused = await refusal(embed(router, **{"inputs": token_inputs(1), **fields}))
        assert (refused.code, refused.reason) == (grpc.StatusCode.INVALID_ARGUMENT, INVALID_REQUEST)
        assert refused.field == field
    assert not worker.submits


async def test_a_model_of_another_task_is_refused() -> None:
    async with cluster(FakeWorker("a"), *fakes("b", model="vectors")) as router:
        for call in (
            embed(router, token_inputs(1), model="tiny"),
            router.stub.Score(ScoreRequest(inputs=token_inputs(1), model="vectors")),
            router.generate([1, 2, 3], model="vectors"),
        ):
            refused = await refusal(call)
            assert (refused.reason, refused.field) == (INVALID_REQUEST, "model")


async def test_queries_are_refused_where_a_model_has_no_place_for_them() -> None:
    model = PoolingModel(labels=["relevance"], takes_no_pairs=True)
    (worker,) = fakes("a", **{**SCORES, "pooling": model})
    async with cluster(worker) as router:
        call = router.stub.Score(ScoreRequest(queries=["why"], inputs=[Input(text="a red fox")]), timeout=60.0)
        refused = await refusal(call)
        assert (refused.reason, refused.field) == (INVALID_REQUEST, "queries")

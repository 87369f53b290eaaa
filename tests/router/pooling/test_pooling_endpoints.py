"""Vectors and scores over HTTP, in the shapes of OpenAI, Jina, Cohere and vLLM."""

import asyncio
from array import array
from base64 import b64decode
from typing import Any

import pytest

from tests.router.cluster import until
from tests.router.fake_worker import FakeWorker, score_of, vector_of
from tests.router.openai.openai_rig import client
from tests.router.tokenizer_files import VOCAB_SIZE
from trunkline.v1.generation_pb2 import Score
from trunkline.v1.worker_pb2 import Capability, PoolingModel, Task
from trunkline_router.request.inputs import MAX_INPUTS

DOCUMENTS = ["a short one", "the longest of all documents here", "of middling length"]
RANKED = [1, 2, 0]  # a fake worker likes long ones
LABELS = ["no", "maybe", "yes"]


def embedder(**fields: Any) -> FakeWorker:
    pooling = PoolingModel(dimensions=2, offered_dimensions=[1], prompts={"query": "q: "})
    return FakeWorker(
        "e", task=Task.TASK_EMBED, capabilities=[Capability.CAPABILITY_VECTORS], pooling=pooling, **fields
    )


def scorer(*labels: str, **fields: Any) -> FakeWorker:
    return FakeWorker(
        "s",
        task=Task.TASK_SCORE,
        capabilities=[Capability.CAPABILITY_SCORES],
        pooling=PoolingModel(labels=labels),
        **fields,
    )


async def test_embeddings_are_in_the_order_of_the_inputs_as_numbers_or_bytes() -> None:
    worker = embedder()
    async with client(worker) as asks:
        for given in ("hi there", ["hi", "there"], [5, 6, 7], [[5, 6], [7]]):
            answer = await asks.answer("/v1/embeddings", input=given)
            prompts = [submit.prompt_token_ids for submit in worker.submits]
            worker.submits.clear()
            assert [each["embedding"] for each in answer["data"]] == list(map(vector_of, prompts))
            assert [each["index"] for each in answer["data"]] == list(range(len(prompts)))
            num_tokens = sum(map(len, prompts))
            assert (answer["usage"]["prompt_tokens"], answer["usage"]["total_tokens"]) == (num_tokens, num_tokens)
            encoded = await asks.answer("/v1/embeddings", input=given, encoding_format="base64")
            assert [[*array("f", b64decode(each["embedding"]))] for each in encoded["data"]] == list(
                map(vector_of, prompts)
            )
            worker.submits.clear()
        assert (await asks.answer("/pooling", input="hi"))["data"][0]["data"][0] == 3.0
        assert worker.submits[0].lane == 2


async def test_what_a_request_chooses_reaches_the_worker() -> None:
    worker = embedder()
    async with client(worker) as asks:
        body = {"dimensions": 1, "use_activation": False, "priority": 1, "prompt_name": "query"}
        body |= {"add_special_tokens": True, "embed_dtype": "float32", "endianness": "little", "task": "embed"}
        await asks.answer("/v1/embeddings", input="hi", user="u", **body)
        (submit,) = worker.submits
        assert (submit.work.dimensions, submit.work.raw, submit.lane) == (1, True, 3)
        assert len(submit.prompt_token_ids) == len("<q: hi")


async def test_what_was_cut_off_is_told() -> None:
    async with client(embedder(context_length=8)) as asks:
        cut = await asks.answer("/v1/embeddings", input=["hi", "x" * 20], truncate_prompt_tokens=-1)
        assert cut["usage"]["truncated_tokens"] == 21 - 8
        error = await asks.refusal("/v1/embeddings", input=["hi", "x" * 20])
        assert (error["code"], error["param"]) == ("context_length_exceeded", "input[1]")


async def test_documents_are_sorted_by_relevance() -> None:
    worker = scorer("relevance")
    async with client(worker) as asks:
        for path in ("/v1/rerank", "/rerank"):
            answer = await asks.answer(
                path, query="why", documents=[DOCUMENTS[0], {"text": DOCUMENTS[1]}, DOCUMENTS[2]]
            )
            assert [result["index"] for result in answer["results"]] == RANKED
            assert [result["document"]["text"] for result in answer["results"]] == [DOCUMENTS[i] for i in RANKED]
            scores = [result["relevance_score"] for result in answer["results"]]
            assert scores == sorted(scores, reverse=True)
        assert scores[0] == pytest.approx(score_of(worker.submits[1].prompt_token_ids))
        few = await asks.answer("/v1/rerank", query="why", documents=DOCUMENTS, top_n=2, return_documents=False)
        assert [result.keys() for result in few["results"]] == [{"index", "relevance_score"}] * 2
        cohere = await asks.answer("/v2/rerank", query="why", documents=DOCUMENTS, top_n=1)
        assert cohere["results"] == [few["results"][0]]
        assert cohere["meta"]["billed_units"] == {"search_units": 1}


@pytest.mark.parametrize("names", [("text_1", "text_2"), ("queries", "documents"), ("data_1", "data_2")])
async def test_pairs_are_scored_one_with_all_or_one_by_one(names: tuple[str, str]) -> None:
    worker = scorer("relevance")
    async with client(worker) as asks:
        for queries, num_prompts in (("why", 3), (["why", "who", "when"], 3)):
            answer = await asks.answer("/v1/score", **{names[0]: queries, names[1]: DOCUMENTS})
            assert [each["index"] for each in answer["data"]] == list(range(num_prompts))
            prompts = [submit.prompt_token_ids for submit in worker.submits]
            assert [each["score"] for each in answer["data"]] == pytest.approx(list(map(score_of, prompts)))
            worker.submits.clear()
        two: dict[str, Any] = {names[0]: ["why", "who"], names[1]: DOCUMENTS}
        error = await asks.refusal("/score", **two)
        assert error["param"] == names[0]
        alone: dict[str, Any] = {names[0]: "why"}
        assert (await asks.refusal("/score", **alone))["param"] == "text_1"


async def test_a_class_is_named_by_its_label() -> None:
    worker = scorer(*LABELS, answer=None)
    async with client(worker) as asks:
        asking = asyncio.create_task(asks.answer("/classify", input=["a", "b"]))
        for probabilities in ([0.1, 0.7, 0.2], [0.9, 0.05, 0.05]):
            (await worker.arrived.get()).whole(score=Score(values=probabilities))
        data = (await asking)["data"]
        assert [(each["label"], each["num_classes"]) for each in data] == [("maybe", 3), ("no", 3)]
        assert data[0]["probs"] == pytest.approx([0.1, 0.7, 0.2])
        refused = await asks.refusal("/v1/rerank", query="a", documents=["b"])
        assert refused["param"] == "model"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": []}, "input"),
        ({"input": ""}, "input[0]"),
        ({"input": ["a", ""]}, "input[1]"),
        ({"input": [[]]}, "input"),
        ({"input": ["a"] * (MAX_INPUTS + 1)}, "input"),
        ({"input": [VOCAB_SIZE]}, "input[0]"),
        ({"input": [1, "a"]}, "input"),
        ({"input": {"text": "a"}}, "input"),
        ({}, "input"),
        ({"input": "a", "dimensions": 3}, "dimensions"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "a", "prompt_name": "none"}, "prompt_name"),
        ({"input": "a", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"input": "a", "truncate_prompt_tokens": 1 << 20}, "truncate_prompt_tokens"),
        ({"input": "a", "truncation_side": "left"}, "truncation_side"),
        ({"input": "a", "add_special_tokens": False}, "add_special_tokens"),
        ({"input": "a", "embed_dtype": "float16"}, "embed_dtype"),
        ({"input": "a", "endianness": "big"}, "endianness"),
        ({"input": "a", "task": "retrieval.query"}, "task"),
        ({"input": "a", "task": "token_embed"}, "task"),
        ({"input": "a", "task": "classify"}, "task"),
        ({"input": "a", "messages": [{"role": "user", "content": "a"}]}, "messages"),
    ],
)
async def test_a_wrong_field_of_embeddings_is_named(body: dict[str, Any], param: str) -> None:
    worker = embedder()
    async with client(worker) as asks:
        error = await asks.refusal("/v1/embeddings", **body)
        assert (error["code"], error["param"]) == ("invalid_request", param)
    assert not worker.submits


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"documents": ["a"]}, "query"),
        ({"query": "", "documents": ["a"]}, "query"),
        ({"query": "a", "documents": []}, "documents"),
        ({"query": "a", "documents": "a"}, "documents"),
        ({"query": "a", "documents": ["a", ""]}, "documents[1]"),
        ({"query": "a", "documents": ["a", {"title": "b"}]}, "documents[1]"),
        ({"query": "a", "documents": ["a"] * (MAX_INPUTS + 1)}, "documents"),
        ({"query": "a", "documents": ["a"], "top_n": -1}, "top_n"),
        ({"query": "a", "documents": ["a"], "instruction": "b"}, "instruction"),
        ({"query": "a", "documents": ["a"], "rank_fields": ["b"]}, "rank_fields"),
        ({"query": "a", "documents": ["a"], "task": "embed"}, "task"),
    ],
)
async def test_a_wrong_field_of_a_reranking_is_named(body: dict[str, Any], param: str) -> None:
    worker = scorer("relevance")
    async with client(worker) as asks:
        for path in ("/v1/rerank", "/v2/rerank"):
            error = await asks.refusal(path, **body)
            assert (error["code"], error["param"]) == ("invalid_request", param)
    assert not worker.submits


async def test_a_model_of_another_task_is_refused_in_each_direction() -> None:
    text, vectors = FakeWorker("t"), embedder(model="vectors")
    async with client(text, vectors) as asks:
        chat = {"messages": [{"role": "user", "content": "a"}]}
        asked: list[tuple[str, str, dict[str, Any]]] = [
            ("/v1/embeddings", "tiny", {"input": "a"}),
            ("/pooling", "tiny", {"input": "a"}),
            ("/v1/rerank", "vectors", {"query": "a", "documents": ["b"]}),
            ("/v1/chat/completions", "vectors", chat),
            ("/v1/completions", "vectors", {"prompt": "a"}),
        ]
        for path, model, body in asked:
            error = await asks.refusal(path, **{**body, "model": model})
            assert (error["code"], error["param"]) == ("invalid_request", "model"), path
        models = (await asks.http.get("/v1/models")).json()["data"]
        assert {model["id"]: model["task"] for model in models} == {"tiny": "generate", "vectors": "embed"}


@pytest.mark.parametrize(
    "body",
    [
        b'{"model": "tiny", "input": [' + b'"a",' * (1 << 20) + b'"a"]}',
        b'{"model": "tiny", "input": [' + b"[1]," * (1 << 20) + b"[1]]}",
        b'{"model": "tiny", "input": "' + b"a" * (64 << 20) + b'"}',
        b"",
    ],
    ids=["a million texts", "a million lists", "64 MiB", "nothing"],
)
async def test_a_hostile_body_is_refused_before_it_is_parsed(body: bytes) -> None:
    worker = embedder()
    async with client(worker) as asks:
        answer = await asks.post("/v1/embeddings", body)
        assert answer.status_code in (400, 413)
        await until(lambda: not asks.router.gate.held.num_held)
    assert not worker.submits

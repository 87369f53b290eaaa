"""Rerankers as Jina and Cohere have them, and vLLM's /score and /classify."""

from collections.abc import Sequence
from functools import partial

import orjson

from trunkline.status import invalid
from trunkline.v1.generation_pb2 import Score, Vector
from trunkline_router.edge.http_call import HttpCall
from trunkline_router.edge.pooling.pooled_call import SCORE, Json, Pooled, answer_list, pool_of, pooled, usage_json
from trunkline_router.edge.pooling.pooling_fields import (
    ClassifyRequest,
    CohereRerankRequest,
    PoolingFields,
    RerankFields,
    RerankRequest,
    ScoreBody,
)


async def rerank(call: HttpCall) -> None:
    """POST /v1/rerank and /rerank: Jina's shape, which vLLM has as well."""
    body = await call.body(RerankRequest)
    answer = await _ranked(call, body)
    made = {
        "id": f"rerank-{call.request_id}",
        "model": answer.prompt.model,
        "usage": usage_json(call, answer.prompt, answer.usage),
        "results": _results(body, answer, returns_documents=body.return_documents is not False),
    }
    await call.respond(orjson.dumps(made))


async def cohere_rerank(call: HttpCall) -> None:
    """POST /v2/rerank: Cohere's shape."""
    body = await call.body(CohereRerankRequest)
    answer = await _ranked(call, body)
    tokens = {"input_tokens": answer.usage.prompt_tokens, "output_tokens": 0}
    made = {
        "id": call.request_id,
        "results": _results(body, answer, returns_documents=bool(body.return_documents)),
        "meta": {"api_version": {"version": "2"}, "billed_units": {"search_units": 1}, "tokens": tokens},
    }
    await call.respond(orjson.dumps(made))


async def score(call: HttpCall) -> None:
    """POST /v1/score and /score."""
    body = await call.body(ScoreBody)
    await _check_ranks(call, body)

    def entry(index: int, output: Vector | Score) -> Json:
        return {"index": index, "object": "score", "score": output.values[0]}

    await answer_list(call, body, SCORE, entry, _list_fields(call, "score"))


async def classify(call: HttpCall) -> None:
    """POST /classify."""
    body = await call.body(ClassifyRequest)
    labels = (await pool_of(call, body)).limits.pooling.labels
    await answer_list(call, body, SCORE, partial(_class_json, labels), _list_fields(call, "classify"))


async def _ranked(call: HttpCall, body: PoolingFields) -> Pooled:
    """Returns the answer of a model that ranks. Raises RequestRefused."""
    await _check_ranks(call, body)
    return await pooled(call, body, SCORE)


async def _check_ranks(call: HttpCall, body: PoolingFields) -> None:
    """Raises RequestRefused if the model is a classifier, which ranks nothing."""
    labels = (await pool_of(call, body)).limits.pooling.labels
    if len(labels) > 1:
        raise invalid("model", f"the model ranks nothing: it has the {len(labels)} labels of a classifier")


def _relevances(answer: Pooled) -> list[float]:
    return [output.values[0] for output in answer.outputs if isinstance(output, Score)]


def _results(body: RerankFields, answer: Pooled, *, returns_documents: bool) -> list[Json]:
    """Returns the documents, the most relevant first. Of equally relevant ones, the earlier one comes first."""
    relevances, texts = _relevances(answer), body.texts()
    ranked = sorted(range(len(relevances)), key=lambda index: -relevances[index])[: body.top_n or None]
    results = []
    for index in ranked:
        result: Json = {"index": index, "relevance_score": relevances[index]}
        if returns_documents:
            result["document"] = {"text": texts[index]}
        results.append(result)
    return results


def _class_json(labels: Sequence[str], index: int, output: Vector | Score) -> Json:
    values = list(output.values)
    best = values.index(max(values))
    label = labels[best] if best < len(labels) else None
    return {"index": index, "label": label, "probs": values, "num_classes": len(values)}


def _list_fields(call: HttpCall, kind: str) -> Json:
    return {"id": f"{kind}-{call.request_id}", "object": "list", "created": call.created}

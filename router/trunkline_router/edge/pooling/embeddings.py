"""OpenAI's /v1/embeddings and vLLM's /pooling."""

import orjson

from trunkline.capabilities import VECTORS
from trunkline_router.edge.http_call import HttpCall
from trunkline_router.edge.pooling.pooled_call import SCORE, VECTOR, pool_of, pooled, usage_json, vectors_json
from trunkline_router.edge.pooling.pooling_fields import EmbeddingRequest


async def embeddings(call: HttpCall) -> None:
    """POST /v1/embeddings."""
    body = await call.body(EmbeddingRequest)
    answer = await pooled(call, body, VECTOR)
    vectors = await vectors_json(answer.outputs, as_base64=body.encoding_format == "base64")
    data = [{"object": "embedding", "index": index, "embedding": vector} for index, vector in enumerate(vectors)]
    made = {"object": "list", "data": data, "model": answer.prompt.model, "usage": usage_json(call, answer)}
    await call.respond(orjson.dumps(made))


async def pooling(call: HttpCall) -> None:
    """POST /pooling: vectors of an embedding model, scores of a model that ranks or classifies."""
    body = await call.body(EmbeddingRequest)
    has_vectors = (await pool_of(call, body)).able(VECTORS) is not None
    answer = await pooled(call, body, VECTOR if has_vectors else SCORE)
    values = await vectors_json(answer.outputs, as_base64=body.encoding_format == "base64")
    made = {
        "id": f"pool-{call.request_id}",
        "object": "list",
        "created": call.created,
        "model": answer.prompt.model,
        "data": [{"index": index, "object": "pooling", "data": each} for index, each in enumerate(values)],
        "usage": usage_json(call, answer),
    }
    await call.respond(orjson.dumps(made))

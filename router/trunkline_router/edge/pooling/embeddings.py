"""OpenAI's /v1/embeddings and vLLM's /pooling."""

from trunkline.capabilities import VECTORS
from trunkline_router.edge.http_call import HttpCall
from trunkline_router.edge.pooling.pooled_call import SCORE, VECTOR, list_json, pool_of, pooled, usage_json, values_of
from trunkline_router.edge.pooling.pooling_fields import EmbeddingRequest


async def embeddings(call: HttpCall) -> None:
    """POST /v1/embeddings."""
    body = await call.body(EmbeddingRequest)
    answer = await pooled(call, body, VECTOR)
    as_base64 = body.encoding_format == "base64"
    data = (
        {"object": "embedding", "index": index, "embedding": values_of(output, as_base64=as_base64)}
        for index, output in enumerate(answer.outputs)
    )
    made = {"object": "list", "model": answer.prompt.model, "usage": usage_json(call, answer)}
    await call.respond(await list_json(made, data))


async def pooling(call: HttpCall) -> None:
    """POST /pooling: vectors of an embedding model, scores of a model that ranks or classifies."""
    body = await call.body(EmbeddingRequest)
    has_vectors = (await pool_of(call, body)).able(VECTORS) is not None
    answer = await pooled(call, body, VECTOR if has_vectors else SCORE)
    as_base64 = body.encoding_format == "base64"
    data = (
        {"index": index, "object": "pooling", "data": values_of(output, as_base64=as_base64)}
        for index, output in enumerate(answer.outputs)
    )
    made = {
        "id": f"pool-{call.request_id}",
        "object": "list",
        "created": call.created,
        "model": answer.prompt.model,
        "usage": usage_json(call, answer),
    }
    await call.respond(await list_json(made, data))

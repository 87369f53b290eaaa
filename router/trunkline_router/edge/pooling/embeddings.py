"""OpenAI's /v1/embeddings and vLLM's /pooling."""

from trunkline.capabilities import VECTORS
from trunkline.v1.generation_pb2 import Score, Vector
from trunkline_router.edge.http_call import HttpCall
from trunkline_router.edge.pooling.pooled_call import SCORE, VECTOR, Json, answer_list, pool_of, values_of
from trunkline_router.edge.pooling.pooling_fields import EmbeddingRequest


async def embeddings(call: HttpCall) -> None:
    """POST /v1/embeddings."""
    body = await call.body(EmbeddingRequest)
    as_base64 = body.encoding_format == "base64"

    def entry(index: int, output: Vector | Score) -> Json:
        return {"object": "embedding", "index": index, "embedding": values_of(output, as_base64=as_base64)}

    await answer_list(call, body, VECTOR, entry, {"object": "list"})


async def pooling(call: HttpCall) -> None:
    """POST /pooling: vectors of an embedding model, scores of a model that ranks or classifies."""
    body = await call.body(EmbeddingRequest)
    has_vectors = (await pool_of(call, body)).able(VECTORS) is not None
    as_base64 = body.encoding_format == "base64"

    def entry(index: int, output: Vector | Score) -> Json:
        return {"index": index, "object": "pooling", "data": values_of(output, as_base64=as_base64)}

    fields = {"id": f"pool-{call.request_id}", "object": "list", "created": call.created}
    await answer_list(call, body, VECTOR if has_vectors else SCORE, entry, fields)

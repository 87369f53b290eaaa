"""A request for vectors or scores over HTTP: it goes the way of all requests, and its answer is collected."""

import asyncio
from base64 import b64encode
from collections.abc import Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from trunkline.v1.generation_pb2 import Score, Vector
from trunkline.v1.inference_pb2 import PromptInfo, Usage
from trunkline.v1.worker_pb2 import OutputKind
from trunkline_router.edge.http_call import HttpCall, answer_of
from trunkline_router.edge.pooling.pooling_fields import PoolingFields
from trunkline_router.edge.request_fields import refusals_named
from trunkline_router.request.request_call import Extras
from trunkline_router.workers.pool import Pool

Json = dict[str, Any]
VECTOR, SCORE = OutputKind.OUTPUT_KIND_VECTOR, OutputKind.OUTPUT_KIND_SCORE
PIECE_BYTES = 64 << 10  # of an answer that are made without a pause: half a millisecond


@dataclass(frozen=True, slots=True)
class Pooled:
    """The whole answer.

    outputs: by input
    """

    prompt: PromptInfo
    outputs: Sequence[Vector | Score]
    usage: Usage


async def pooled(call: HttpCall, body: PoolingFields, output: "OutputKind.ValueType") -> Pooled:
    """Returns the answer to a request. Raises RequestRefused."""
    names = body.field_names
    with call.converting(), refusals_named(names):
        inputs = body.inputs()
    extras = Extras(work=body.work(output), inputs=inputs)
    found: dict[int, Vector | Score] = {}
    prompt, usage = PromptInfo(), Usage()
    async with aclosing(answer_of(call, body.generate_request(call.request_id), names, extras)) as responses:
        async for response in responses:
            call.passage.answer_begins()
            if response.HasField("prompt"):
                prompt = response.prompt
            (chunk,) = response.chunks
            found[chunk.index] = response.vector if output == VECTOR else response.score
            usage = response.usage
    return Pooled(prompt, [found[index] for index in range(len(inputs.given))], usage)


async def pool_of(call: HttpCall, body: PoolingFields) -> Pool:
    """Returns the workers of the model. Raises RequestRefused."""
    return await call.edge.inference.preparer.pool(body.model or "", call.caller, None)


def usage_json(call: HttpCall, answer: Pooled) -> Json:
    usage = answer.usage
    made: Json = {"prompt_tokens": usage.prompt_tokens, "total_tokens": usage.prompt_tokens, "completion_tokens": 0}
    if call.caller.identity.sees_cache:
        made["prompt_tokens_details"] = {"cached_tokens": usage.cached_tokens}
    if answer.prompt.truncated_tokens:
        made["truncated_tokens"] = sum(answer.prompt.truncated_tokens)
    return made


def values_of(output: Vector | Score, *, as_base64: bool) -> Any:
    """Returns the values of an output as list_json() takes them."""
    values = output.values if isinstance(output, Vector) else np.array(output.values, "<f4").tobytes()
    return b64encode(values).decode() if as_base64 else np.frombuffer(values, "<f4")


async def list_json(answer: Json, entries: Iterable[Json]) -> list[bytes]:
    """Returns the answer with the entries as its `data`, in pieces. Other tasks run in between: the entries may have
    millions of numbers."""
    head, data, tail = orjson.dumps({**answer, "data": []}).partition(b'"data":[]')
    pieces, piece = [], bytearray(head + data[:-1])
    for index, entry in enumerate(entries):
        piece += b"," if index else b""
        piece += orjson.dumps(entry, option=orjson.OPT_SERIALIZE_NUMPY)
        if len(piece) >= PIECE_BYTES:
            pieces.append(bytes(piece))
            piece.clear()
            await asyncio.sleep(0)
    return [*pieces, bytes(piece) + b"]" + tail]

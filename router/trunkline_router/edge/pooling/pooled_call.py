"""A request for vectors or scores over HTTP: it goes the way of all requests. Its answer is collected, or sent as it is
computed if it is large."""

import asyncio
from base64 import b64encode
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from trunkline.v1.generation_pb2 import Score, Vector
from trunkline.v1.inference_pb2 import GenerateResponse, PromptInfo, Usage
from trunkline.v1.worker_pb2 import OutputKind
from trunkline_router.edge.http_call import HttpCall, answer_of
from trunkline_router.edge.pooling.pooling_fields import PoolingFields
from trunkline_router.edge.request_fields import refusals_named
from trunkline_router.request.request_call import Extras
from trunkline_router.workers.pool import Pool

Json = dict[str, Any]
Entry = Callable[[int, Vector | Score], Json]  # takes the index of an input and its output
VECTOR, SCORE = OutputKind.OUTPUT_KIND_VECTOR, OutputKind.OUTPUT_KIND_SCORE
PIECE_BYTES = 64 << 10  # of an answer that are made without a pause: half a millisecond
MOST_HELD_BYTES = 8 << 20  # of an answer that is not sent yet


@dataclass(frozen=True, slots=True)
class Pooled:
    """The whole answer.

    outputs: by input
    """

    prompt: PromptInfo
    outputs: Sequence[Vector | Score]
    usage: Usage


async def outputs_of(
    call: HttpCall, body: PoolingFields, output: "OutputKind.ValueType"
) -> AsyncGenerator[tuple[int, GenerateResponse], None]:
    """Yields the index of each input, in any order, with the response that has its output. Raises RequestRefused."""
    names = body.field_names
    with call.converting(), refusals_named(names):
        inputs = body.inputs()
    missing = set(range(len(inputs.given)))
    extras = Extras(work=body.work(output), inputs=inputs)
    async with aclosing(answer_of(call, body.generate_request(call.request_id), names, extras)) as responses:
        async for response in responses:
            call.passage.answer_begins()
            (chunk,) = response.chunks
            missing.remove(chunk.index)
            yield chunk.index, response
    if missing:
        raise RuntimeError(f"an answer without {len(missing)} of its outputs")  # it must not look whole


async def pooled(call: HttpCall, body: PoolingFields, output: "OutputKind.ValueType") -> Pooled:
    """Returns the whole answer to a request. Raises RequestRefused."""
    found: dict[int, Vector | Score] = {}
    prompt, usage = PromptInfo(), Usage()
    async with aclosing(outputs_of(call, body, output)) as responses:
        async for index, response in responses:
            if response.HasField("prompt"):
                prompt = response.prompt
            found[index] = output_of(response)
            usage = response.usage
    return Pooled(prompt, [found[index] for index in range(len(found))], usage)


async def answer_list(
    call: HttpCall, body: PoolingFields, output: "OutputKind.ValueType", entry: Entry, fields: Json
) -> None:
    """Answers with the entries of all outputs as `data`, in the order of the inputs. Raises RequestRefused.

    An answer of up to MOST_HELD_BYTES is sent once it is whole, so that an error before has a status of its own. A
    longer one is sent as it is computed, and an error cuts it off.

    fields: of the answer beside `data`, `model` and `usage`
    """
    sender, piece = BodySender(call), bytearray(b'{"data":[')
    prompt, usage = PromptInfo(), Usage()
    early: dict[int, Vector | Score] = {}  # outputs whose predecessors are not there yet
    num_written = 0
    async with aclosing(outputs_of(call, body, output)) as responses:
        async for index, response in responses:
            if response.HasField("prompt"):
                prompt = response.prompt
            early[index] = output_of(response)
            usage = response.usage
            while num_written in early:
                piece += b"," if num_written else b""
                made = entry(num_written, early.pop(num_written))
                piece += orjson.dumps(made, option=orjson.OPT_SERIALIZE_NUMPY)
                num_written += 1
                if len(piece) >= PIECE_BYTES:
                    await sender.add(bytes(piece))
                    piece.clear()
    end = orjson.dumps({**fields, "model": prompt.model, "usage": usage_json(call, prompt, usage)})
    await sender.end(bytes(piece) + b"]," + end[1:])


class BodySender:
    """Sends the body of an answer in pieces: at once if they are few, else each when it is made."""

    def __init__(self, call: HttpCall) -> None:
        self._call = call
        self._held: list[bytes] = []
        self._held_bytes = 0

    async def add(self, piece: bytes) -> None:
        """Takes the next piece. Returns when the client can take more; other tasks run in between."""
        self._held.append(piece)
        self._held_bytes += len(piece)
        if self._held_bytes > MOST_HELD_BYTES or self._call.has_begun:
            await self._call.send_part(self._held)
            self._held.clear()
        await asyncio.sleep(0)

    async def end(self, piece: bytes) -> None:
        """Takes the last piece, and sends what is held."""
        if self._call.has_begun:
            await self._call.send_part([piece], more=False)
        else:
            await self._call.respond([*self._held, piece])


async def pool_of(call: HttpCall, body: PoolingFields) -> Pool:
    """Returns the workers of the model. Raises RequestRefused."""
    return await call.edge.inference.preparer.pool(body.model or "", call.caller, None)


def output_of(response: GenerateResponse) -> Vector | Score:
    return response.vector if response.HasField("vector") else response.score


def usage_json(call: HttpCall, prompt: PromptInfo, usage: Usage) -> Json:
    made: Json = {"prompt_tokens": usage.prompt_tokens, "total_tokens": usage.prompt_tokens, "completion_tokens": 0}
    if call.caller.identity.sees_cache:
        made["prompt_tokens_details"] = {"cached_tokens": usage.cached_tokens}
    if prompt.truncated_tokens:
        made["truncated_tokens"] = sum(prompt.truncated_tokens)
    return made


def values_of(output: Vector | Score, *, as_base64: bool) -> Any:
    """Returns the values of an output as answer_list() takes them."""
    values = output.values if isinstance(output, Vector) else np.array(output.values, "<f4").tobytes()
    return b64encode(values).decode() if as_base64 else np.frombuffer(values, "<f4")

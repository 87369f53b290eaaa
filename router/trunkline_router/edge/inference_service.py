"""InferenceService: a router's RPCs for clients."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, suppress
from functools import partial
from typing import Any

from trunkline.capabilities import name_of
from trunkline.grant import GrantKeys
from trunkline.status import forbidden, invalid
from trunkline.v1.inference_pb2 import (
    DetokenizeRequest,
    Embedding,
    EmbedRequest,
    EmbedResponse,
    GenerateRequest,
    GenerateResponse,
    GrantRequest,
    GrantResponse,
    Input,
    InputScore,
    ListModelsRequest,
    ListModelsResponse,
    Model,
    ScoreRequest,
    ScoreResponse,
    TokenizeRequest,
)
from trunkline.v1.inference_pb2_grpc import InferenceServiceServicer
from trunkline.v1.worker_pb2 import OutputKind, Work
from trunkline_router.access.access import Access, Caller, Context
from trunkline_router.prompts.token_ids import detokenize_response, tokenize_response
from trunkline_router.record.request_record import GRANT, GRANTED, RequestRecord
from trunkline_router.request.grant_charge import GrantCharge
from trunkline_router.request.granting import Granter
from trunkline_router.request.inference import Inference, ObservedCall, whole_outputs
from trunkline_router.request.inputs import GivenInput, Inputs
from trunkline_router.request.request_call import Extras, PreparedRequest, RequestCall

GENERATE_RPC, GRANT_RPC, EMBED_RPC, SCORE_RPC = (
    f"trunkline.v1.InferenceService/{method}" for method in ("Generate", "Grant", "Embed", "Score")
)
FIRST_MESSAGE_S = 10.0  # a Grant call that sends nothing for this long is ended: otherwise it would stay open forever


class InferenceService(InferenceServiceServicer):
    """Translates RPCs. A call that fails raises RequestRefused, which becomes the call's gRPC status."""

    def __init__(self, inference: Inference, access: Access, *, grant_keys: GrantKeys | None = None) -> None:
        self._inference = inference
        self._access = access
        keys = grant_keys or GrantKeys()
        self._granter = Granter(inference.dispatcher, keys, lambda: int(time.time() * 1e3), inference.running)

    async def stop_admission(self) -> None:
        """Refuses new requests from now on. Returns when the last running request has ended."""
        await self._inference.running.stop()

    def Generate(self, request: GenerateRequest, context: Context) -> AsyncGenerator[GenerateResponse, None]:
        return self._inference.generate(RequestCall.of(request, context, self._access, GENERATE_RPC))

    async def Embed(self, request: EmbedRequest, context: Context) -> AsyncGenerator[EmbedResponse, None]:
        inputs = Inputs(
            inputs_of(request.inputs),
            prompt_name=request.prompt_name,
            prompt=request.prompt if request.HasField("prompt") else None,
            truncate_to=truncation_of(request),
        )
        work = Work(output=OutputKind.OUTPUT_KIND_VECTOR, dimensions=request.dimensions, raw=request.raw)
        async with aclosing(self._pooled(request, inputs, work, context, EMBED_RPC)) as responses:
            async for response in responses:
                yield EmbedResponse(
                    request_id=response.request_id,
                    embeddings=[Embedding(index=chunk.index, vector=response.vector) for chunk in response.chunks],
                    prompt=response.prompt if response.HasField("prompt") else None,
                    usage=response.usage if response.HasField("usage") else None,
                )

    async def Score(self, request: ScoreRequest, context: Context) -> AsyncGenerator[ScoreResponse, None]:
        inputs = Inputs(
            inputs_of(request.inputs),
            queries=request.queries,
            instruction=request.instruction,
            truncate_to=truncation_of(request),
        )
        work = Work(output=OutputKind.OUTPUT_KIND_SCORE, raw=request.raw)
        async with aclosing(self._pooled(request, inputs, work, context, SCORE_RPC)) as responses:
            async for response in responses:
                yield ScoreResponse(
                    request_id=response.request_id,
                    scores=[InputScore(index=chunk.index, score=response.score) for chunk in response.chunks],
                    prompt=response.prompt if response.HasField("prompt") else None,
                    usage=response.usage if response.HasField("usage") else None,
                )

    def _pooled(
        self, request: EmbedRequest | ScoreRequest, inputs: Inputs, work: Work, context: Context, rpc: str
    ) -> AsyncGenerator[GenerateResponse, None]:
        """Returns the responses of the path that all protocols share: each has the output of one input."""
        shared = GenerateRequest(
            model=request.model, request_id=request.request_id, lane=request.lane, cache_salt=request.cache_salt
        )
        call = RequestCall.of(shared, context, self._access, rpc, Extras(work=work, inputs=inputs))
        return whole_outputs(self._inference.generate(call))

    async def Grant(
        self, request_iterator: AsyncIterator[GrantRequest], context: Context
    ) -> AsyncGenerator[GrantResponse, None]:
        first = None
        with suppress(TimeoutError):
            async with asyncio.timeout(FIRST_MESSAGE_S):
                first = await anext(request_iterator, None)
        # Only now: if a call ends while its client is still writing, grpc.aio can hide the status from the client.
        self._granter.check_offered()
        if first is None or first.WhichOneof("news") != "request":
            raise invalid("request", f"must be in the first message, within {FIRST_MESSAGE_S:g} s")
        call, inference = RequestCall.of(first.request, context, self._access, GRANT_RPC), self._inference
        record = call.record
        record.method = GRANT
        if not call.caller.identity.sees_cache:
            raise forbidden("these credentials may not use the direct path, which tells the worker and its cache")
        with ObservedCall(inference.observer, call), inference.running:
            prepared = await inference.prepare(call)
            self._granter.check_taken(prepared)
            check_reservable(call.caller, prepared)
            reserve = partial(self._charge, call.caller, prepared, record)
            async with aclosing(
                self._granter.answers(prepared, request_iterator, call.time_left, reserve, record)
            ) as answers:
                async for answer in answers:
                    yield answer
            record.outcome = GRANTED

    async def _charge(self, caller: Caller, prepared: PreparedRequest, record: RequestRecord) -> GrantCharge:
        """Reserves the most that a granted request can use. Raises RequestRefused (QUOTA_EXCEEDED)."""
        reservation = await self._inference.reserve(caller, prepared, record, in_full=True)
        return GrantCharge(reservation, len(prepared.prompt), prepared.choices * prepared.most_output_tokens)

    async def Tokenize(self, request: TokenizeRequest, context: Context) -> Any:  # serialized
        caller = self._access.admitted()
        return await tokenize_response(await self._inference.tokenize(request, caller, context.time_remaining()))

    async def Detokenize(self, request: DetokenizeRequest, context: Context) -> Any:  # serialized
        caller = self._access.admitted()
        utf8 = await self._inference.detokenize(
            request.model,
            request.token_ids,
            caller,
            context.time_remaining(),
            keep_special=request.keep_special_tokens,
        )
        return detokenize_response(utf8)

    async def ListModels(self, request: ListModelsRequest, context: Context) -> ListModelsResponse:
        found = await self._inference.models(self._access.admitted())
        return ListModelsResponse(
            models=[
                Model(
                    name=name,
                    context_length=pool.limits.context_length,
                    vocab_size=pool.limits.vocab_size,
                    has_chat_template=pool.tokenizer.has_chat_template,
                    ready_workers=len(pool.workers),
                    task=name_of(pool.task),
                    dimensions=pool.limits.pooling.dimensions,
                    labels=pool.limits.pooling.labels,
                )
                for name, pool in found.items()
            ]
        )


def inputs_of(inputs: Sequence[Input]) -> list[GivenInput]:
    """Returns the inputs of a message. One that is neither a text nor token ids is empty."""
    return [one.token_ids.ids if one.HasField("token_ids") else one.text for one in inputs]


def truncation_of(request: EmbedRequest | ScoreRequest) -> int | None:
    return request.truncate_prompt_tokens if request.HasField("truncate_prompt_tokens") else None


def check_reservable(caller: Caller, prepared: PreparedRequest) -> None:
    """Raises RequestRefused (FORBIDDEN) if the most that the request can use is more than its tenant's quotas ever
    allow. Generate would serve such a request by an estimate."""
    bound = caller.terms.quotas.largest_request()
    if bound is None or prepared.sampling.HasField("max_tokens"):
        return
    name, most_tokens = bound
    prompt_tokens = len(prepared.prompt)
    tokens = prompt_tokens + prepared.choices * prepared.most_output_tokens
    if prompt_tokens <= most_tokens < tokens:
        words = name.replace("_", " ")
        raise forbidden(
            f"without max_tokens the request may use {tokens} tokens, more than can ever be granted to its tenant: "
            f"{most_tokens} {words}"
        )

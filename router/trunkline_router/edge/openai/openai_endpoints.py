"""The endpoints of OpenAI's completions, chat completions and models, and of vLLM's tokenization."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from datetime import UTC, datetime
from functools import partial
from typing import Any, TypeVar

import orjson

from trunkline.status import CODE_NOT_FOUND, MODEL_NOT_FOUND, RequestRefused, invalid
from trunkline.v1.generation_pb2 import SamplingParams
from trunkline.v1.inference_pb2 import GenerateResponse
from trunkline.validation import max_total_tokens
from trunkline_router.edge.http.json_body import json_list, packed
from trunkline_router.edge.http_call import HttpCall, answer_of
from trunkline_router.edge.openai.openai_answers import ChatAnswer, CompletionAnswer
from trunkline_router.edge.openai.openai_requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeBody,
    Prompt,
    TokenizeBody,
)
from trunkline_router.edge.openai.token_details import LogprobsBound, PromptDetails
from trunkline_router.edge.request_fields import refusals_named, validated
from trunkline_router.request.request_call import MAX_REQUEST_ID
from trunkline_router.workers.pool import Pool

AT_ONCE = 32  # prompts of one request that are answered at the same time
OWNER = "trunkline"
CREATED_S = 0  # workers do not tell when a model was made

Item = TypeVar("Item")


async def chat_completions(call: HttpCall) -> None:
    """POST /v1/chat/completions."""
    async with call.json() as body:
        request: ChatRequest = validated(ChatRequest, body)
        call.check_unknown(request.unknown())
        request.check()
        call.edge.inference.check_choices(request.n or 1)
        generate = request.generate_request(call.request_id)
    details = PromptDetails(request, LogprobsBound(request))
    responses = details.scored(answer_of(call, generate, request.field_names, details.extras(call)))
    answer = ChatAnswer(call, request, [details])
    if request.stream:
        await call.stream(responses, answer)
        return
    await call.collect(responses, answer.take)
    await call.respond(await answer.whole())


async def completions(call: HttpCall) -> None:
    """POST /v1/completions."""
    async with call.json() as body:
        request: CompletionRequest = validated(CompletionRequest, body)
        call.check_unknown(request.unknown())
        request.check()
        call.edge.inference.check_choices(request.n or 1)
        sampling = request.sampling_params()
        prompts = await _prompts(call, request)
    ids = [call.request_id]
    if len(prompts) > 1:  # room for a number within the longest request id
        ids = [f"{call.request_id[: MAX_REQUEST_ID - 4]}-{number}" for number in range(len(prompts))]
    bound = LogprobsBound(request)  # of a body; in a stream each prompt has an event of its own
    details = [
        PromptDetails(request, LogprobsBound(request) if request.stream else bound, prompt) for prompt in prompts
    ]
    parts = [partial(_answer_to, call, request, one, name, sampling) for one, name in zip(details, ids, strict=True)]
    responses, answer = merged(parts), CompletionAnswer(call, request, details)
    if request.stream:
        await call.stream(responses, answer)
        return
    await call.collect(responses, answer.take)
    await call.respond(await answer.whole())


async def _prompts(call: HttpCall, request: CompletionRequest) -> list[Prompt]:
    """Returns texts as they are and token ids as arrays. Raises RequestRefused (INVALID_REQUEST, and as check_lengths()
    before an id is looked at)."""
    given = request.prompts()
    if not isinstance(given[0], str):
        await call.edge.inference.check_lengths(request.model, call.caller, map(len, given))
    return [prompt if isinstance(prompt, str) else packed(prompt, "prompt") for prompt in given]


def _answer_to(
    call: HttpCall, request: CompletionRequest, details: PromptDetails, request_id: str, sampling: SamplingParams
) -> AsyncGenerator[GenerateResponse, None]:
    """Returns the answer to one of the prompts, whose message is made only when its turn comes: 256 copies of large
    sampling parameters would hold the event loop."""
    generate = request.generate_request(details.prompt, request_id, sampling)
    return details.scored(answer_of(call, generate, request.field_names, details.extras(call)))


async def merged(
    answers: Sequence[Callable[[], AsyncGenerator[Item, None]]],
) -> AsyncGenerator[tuple[int, Item], None]:
    """Yields the items of all answers as they come, each with the index of its answer. At most AT_ONCE run at a time,
    and each waits until its item is taken. The first error ends them all, and is raised."""
    if len(answers) == 1:  # most requests: without tasks
        async with aclosing(answers[0]()) as items:
            async for item in items:
                yield 0, item
        return
    queue: asyncio.Queue[tuple[int, Item] | BaseException | None] = asyncio.Queue(maxsize=1)
    places = asyncio.Semaphore(AT_ONCE)
    door = asyncio.Lock()  # one begins in a round of the event loop: the first step of each may take a millisecond

    async def run(index: int) -> None:
        async with places:
            async with door:
                await asyncio.sleep(0)
            end: BaseException | None = None
            try:
                async with aclosing(answers[index]()) as items:
                    async for item in items:
                        await queue.put((index, item))
            except Exception as error:
                end = error
            await queue.put(end)  # in its place: after an error no other answer begins

    tasks = [asyncio.create_task(run(index)) for index in range(len(answers))]
    try:
        num_running = len(tasks)
        while num_running:
            event = await queue.get()
            if event is None:
                num_running -= 1
            elif isinstance(event, BaseException):
                raise event
            else:
                yield event
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def list_models(call: HttpCall) -> None:
    """GET /v1/models: the models, then their aliases, without those that stand for many names."""
    preparer, found = call.edge.inference.preparer, await call.edge.inference.models(call.caller)
    names = [name for name in sorted(preparer.aliases.exact) if name not in found]
    models = {name: preparer.served_name(name, call.caller) for name in names}
    aliases = {name: found[model] for name, model in models.items() if model in found}
    data = [_model(name, pool) for name, pool in [*found.items(), *aliases.items()]]
    ids = [model["id"] for model in data]
    body = {
        "object": "list",
        "data": data,
        "has_more": False,
        "first_id": ids[0] if ids else None,
        "last_id": ids[-1] if ids else None,
    }
    await call.respond(orjson.dumps(body))


async def retrieve_model(call: HttpCall) -> None:
    """GET /v1/models/{id}."""
    name = call.scope["path_params"]["model"]
    inference = call.edge.inference
    pool = (await inference.models(call.caller)).get(inference.preparer.served_name(name, call.caller))
    if pool is None:
        raise RequestRefused(CODE_NOT_FOUND, MODEL_NOT_FOUND, f"no model {name[:128]!r}", field="model")
    await call.respond(orjson.dumps(_model(name, pool)))


def _model(name: str, pool: Pool) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": CREATED_S,
        "owned_by": OWNER,
        "root": pool.name,  # the model, if the name is an alias of it
        "parent": None,
        "max_model_len": max_total_tokens(pool.limits),
        "type": "model",
        "display_name": name,
        "created_at": datetime.fromtimestamp(CREATED_S, UTC).isoformat().replace("+00:00", "Z"),
    }


async def tokenize(call: HttpCall) -> None:
    """POST /tokenize."""
    async with call.json() as given:
        body: TokenizeBody = validated(TokenizeBody, given)
        call.check_unknown(body.unknown())
        request = body.tokenize_request()
    inference = call.edge.inference
    with refusals_named(body.field_names):
        ids = await inference.tokenize(request, call.caller, None)
    pool = await inference.found(request.model, call.caller, None)
    answer = {"count": len(ids), "max_model_len": max_total_tokens(pool.limits), "tokens": await json_list(ids)}
    if body.return_token_strs:
        answer["token_strs"] = await json_list(ids, (await pool.tokenizer.token_bytes()).text)
    await call.respond(orjson.dumps(answer))


async def detokenize(call: HttpCall) -> None:
    """POST /detokenize."""
    async with call.json() as given:
        body: DetokenizeBody = validated(DetokenizeBody, given)
        call.check_unknown(body.unknown())
        inference, model = call.edge.inference, body.model or ""
        if not isinstance(body.tokens, list):
            raise invalid("tokens", "must be a list of token ids")
        with refusals_named({"token_ids": "tokens"}):
            await inference.detokenizing_pool(model, len(body.tokens), call.caller)  # before an id is looked at
        ids = packed(body.tokens, "tokens")
    with refusals_named({"token_ids": "tokens"}):
        utf8 = await inference.detokenize(model, ids, call.caller, None)
    await call.respond(orjson.dumps({"prompt": utf8.decode()}))

"""POST /v1/completions and /v1/chat/completions."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from functools import partial

from trunkline.v1.inference_pb2 import GenerateRequest, GenerateResponse
from trunkline_router.edge.answering import answer_of
from trunkline_router.edge.http_call import HttpCall
from trunkline_router.edge.long_lists import packed
from trunkline_router.edge.merged_answers import merged
from trunkline_router.edge.openai.answer import AnswerId, CollectedAnswer
from trunkline_router.edge.openai.chat_answer import ChatStream, chat_completion
from trunkline_router.edge.openai.chat_request import ChatRequest
from trunkline_router.edge.openai.completion_answer import CompletionStream, completion
from trunkline_router.edge.openai.completion_request import CompletionRequest, Prompt
from trunkline_router.edge.openai.told_prompt import LogprobsBound, PromptOptions, ToldPrompt
from trunkline_router.edge.request_fields import validated
from trunkline_router.request.request_call import MAX_REQUEST_ID, Extras


async def chat_completions(call: HttpCall) -> None:
    """POST /v1/chat/completions."""
    async with call.json() as body:
        request: ChatRequest = validated(ChatRequest, body)
        call.check_unknown(request.unknown())
        request.check()
        call.edge.inference.check_choices(request.n or 1)
        generate = request.generate_request(call.request_id)
    scores_prompt = request.prompt_logprobs is not None
    options = PromptOptions(names=bool(request.logprobs) or scores_prompt, token_ids=bool(request.return_token_ids))
    bound = LogprobsBound(request.prompt_logprobs or 0, 1, "prompt_logprobs") if scores_prompt else None
    told = ToldPrompt()
    extras = Extras(on_admission=options.on_admission(call, told, bound))
    answer_id = AnswerId(f"chatcmpl-{call.request_id}", call.created, call.caller.identity.sees_cache)
    responses = answer_of(call, generate, request.field_names, extras)
    if scores_prompt:
        responses = told.scored(responses, columns_top=None, has_logprobs=True)
    if request.stream:
        await call.stream(responses, ChatStream(request, answer_id, told))
        return
    answer = CollectedAnswer()
    await call.collect(responses, answer.take)
    await call.respond(chat_completion(request, answer_id, answer, told))


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
    answer_id = AnswerId(f"cmpl-{call.request_id}", call.created, call.caller.identity.sees_cache)
    told = [ToldPrompt() for _ in prompts]
    bound = _bound(request)
    parts = []
    for prompt, name, tells in zip(prompts, ids, told, strict=True):
        extras = _extras(call, request, prompt, tells, _bound(request) if request.stream else bound)
        generate = partial(request.generate_request, prompt, name, sampling)
        parts.append(partial(_answer, call, request, generate, extras, tells))
    responses = merged(parts)
    if request.stream:
        await call.stream(responses, CompletionStream(request, answer_id, told))
        return
    answers = [CollectedAnswer() for _ in prompts]
    await call.collect(responses, lambda item: answers[item[0]].take(item[1]))
    await call.respond(await completion(request, answer_id, answers, told))


async def _prompts(call: HttpCall, request: CompletionRequest) -> list[Prompt]:
    """Returns texts as they are and token ids as arrays. Raises RequestRefused (INVALID_REQUEST, and as check_lengths()
    before an id is looked at)."""
    given = request.prompts()
    if not isinstance(given[0], str):
        await call.edge.inference.check_lengths(request.model, call.caller, map(len, given))
    made: list[Prompt] = []
    for prompt in given:
        if made:
            await asyncio.sleep(0)  # 256 prompts may have a million token ids together
        made.append(prompt if isinstance(prompt, str) else await packed(prompt, "prompt"))
    return made


def _answer(
    call: HttpCall,
    request: CompletionRequest,
    generate: Callable[[], GenerateRequest],
    extras: Extras,
    told: ToldPrompt,
) -> AsyncGenerator[GenerateResponse, None]:
    """Returns the answer to one of the prompts, whose message is made only when its turn comes: 256 copies of large
    sampling parameters would hold the event loop."""
    responses = answer_of(call, generate(), request.field_names, extras)
    if not request.scores_prompt:
        return responses
    columns_top = request.logprobs if request.echo else None
    return told.scored(responses, columns_top=columns_top, has_logprobs=request.prompt_logprobs is not None)


def _bound(request: CompletionRequest) -> LogprobsBound | None:
    if not request.scores_prompt:
        return None
    field = "logprobs" if request.prompt_logprobs is None else "prompt_logprobs"
    return LogprobsBound(max(request.logprobs or 0, request.prompt_logprobs or 0), request.n or 1, field)


def _extras(
    call: HttpCall, request: CompletionRequest, prompt: Prompt, told: ToldPrompt, bound: LogprobsBound | None
) -> Extras:
    """Returns how one of the prompts is treated, and lets `told` have what the request wants to be told of it."""
    if isinstance(prompt, str) and request.echo:
        told.text = prompt
    options = PromptOptions(
        names=request.logprobs is not None or request.scores_prompt,
        token_ids=bool(request.return_token_ids),
        decoded=bool(request.echo) and not isinstance(prompt, str),
        offsets=request.logprobs is not None,
        echo=bool(request.echo),
        adds_special=request.add_special_tokens is not False,
        keeps_special=request.skip_special_tokens is False,
    )
    return Extras(
        token_ids=None if isinstance(prompt, str) else prompt,
        special_tokens=options.adds_special,
        on_admission=options.on_admission(call, told, bound),
    )

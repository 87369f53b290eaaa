"""POST /v1/completions and /v1/chat/completions."""

from array import array
from collections.abc import Sequence
from functools import partial

from trunkline.status import invalid
from trunkline.v1.inference_pb2 import GenerateRequest, TokenIds
from trunkline_router.edge.answering import answer_of
from trunkline_router.edge.http_call import HttpCall
from trunkline_router.edge.merging import merged
from trunkline_router.edge.request_fields import validated
from trunkline_router.openai.answer import AnswerId, CollectedAnswer
from trunkline_router.openai.chat_answer import ChatStream, chat_completion
from trunkline_router.openai.chat_request import ChatRequest
from trunkline_router.openai.completion_answer import CompletionStream, Echo, completion
from trunkline_router.openai.completion_request import CompletionRequest, Prompt
from trunkline_router.openai.logprobs import TokenNames
from trunkline_router.prompts.tokenizer import PromptTokenizer
from trunkline_router.request.steps import give_way


async def chat_completions(call: HttpCall) -> None:
    """POST /v1/chat/completions."""
    request: ChatRequest = validated(ChatRequest, await call.json())
    call.check_unknown(request.unknown())
    request.check()
    generate = request.generate_request(call.request_id)
    names, prompt_ids = None, None
    if request.logprobs or request.prompt_logprobs is not None or request.return_token_ids:
        tokenizer = (await call.edge.inference.found(generate.model, call.caller, None)).tokenizer
        names = await tokenizer.token_bytes()
        if request.return_token_ids:
            prompt_ids = await _tokenized(call, tokenizer, generate)
    answer_id = AnswerId(f"chatcmpl-{call.request_id}", call.created, call.caller.identity.sees_cache)
    responses = answer_of(call, generate)
    if request.stream:
        await call.stream(responses, ChatStream(request, answer_id, names, prompt_ids))
        return
    answer = CollectedAnswer(generate.n)
    await call.collect(responses, answer.take)
    await call.respond(chat_completion(request, answer_id, answer, names, prompt_ids))


async def completions(call: HttpCall) -> None:
    """POST /v1/completions."""
    request: CompletionRequest = validated(CompletionRequest, await call.json())
    call.check_unknown(request.unknown())
    request.check()
    prompts = request.prompts()
    ids = [call.request_id] if len(prompts) == 1 else [f"{call.request_id}-{number}" for number in range(len(prompts))]
    generates = [request.generate_request(prompt, name) for prompt, name in zip(prompts, ids, strict=True)]
    names: TokenNames | None = None
    echoes = [Echo()] * len(prompts)
    if request.logprobs is not None or request.scores_prompt or request.return_token_ids or request.echo:
        tokenizer = (await call.edge.inference.found(request.model, call.caller, None)).tokenizer
        names = await tokenizer.token_bytes()
        for index, generate in enumerate(generates):
            echoes[index] = await _echo(call, request, tokenizer, prompts[index], generate)
    elif request.add_special_tokens is False:
        tokenizer = (await call.edge.inference.found(request.model, call.caller, None)).tokenizer
        for generate in generates:
            await _tokenized(call, tokenizer, generate, special_tokens=False)
    answer_id = AnswerId(f"cmpl-{call.request_id}", call.created, call.caller.identity.sees_cache)
    responses = merged([partial(answer_of, call, generate) for generate in generates])
    if request.stream:
        await call.stream(responses, CompletionStream(request, answer_id, echoes, names))
        return
    answers = [CollectedAnswer(request.n or 1) for _ in prompts]
    await call.collect(responses, lambda item: answers[item[0]].take(item[1]))
    await call.respond(completion(request, answer_id, answers, echoes, names))


async def _echo(
    call: HttpCall, request: CompletionRequest, tokenizer: PromptTokenizer, prompt: Prompt, generate: GenerateRequest
) -> Echo:
    """Returns the prompt as the answer repeats it. A text whose tokens are told is sent to workers as tokens."""
    caller = call.caller
    token_ids: Sequence[int] = prompt if not isinstance(prompt, str) else ()
    if isinstance(prompt, str) and (request.scores_prompt or request.return_token_ids):
        token_ids = await _tokenized(call, tokenizer, generate, special_tokens=request.add_special_tokens is not False)
    if not request.echo:
        return Echo(token_ids=token_ids)
    if isinstance(prompt, str):
        return Echo(prompt, token_ids)
    utf8 = await tokenizer.decode(
        array("i", token_ids), keep_special=True, tenant=caller.tenant, weight=caller.terms.weight
    )
    return Echo(utf8.decode(), token_ids)


async def _tokenized(
    call: HttpCall, tokenizer: PromptTokenizer, generate: GenerateRequest, *, special_tokens: bool = True
) -> Sequence[int]:
    """Replaces the request's text or conversation by its tokens, and returns them. Raises RequestRefused."""
    caller = call.caller
    tenant, weight = caller.tenant, caller.terms.weight
    if generate.WhichOneof("prompt") == "chat":
        ids = await tokenizer.encode_chat(generate.chat, tenant=tenant, weight=weight)
    else:
        text = generate.text
        if not text:
            raise invalid("prompt", "is empty")
        await give_way(len(text))
        tokenizer.check_fits(text)
        ids = await tokenizer.encode(text, special_tokens=special_tokens, tenant=tenant, weight=weight)
    generate.token_ids.CopyFrom(TokenIds(ids=ids))
    return ids

"""POST /v1/completions and /v1/chat/completions."""

from collections.abc import Sequence
from functools import partial

from trunkline.status import RequestRefused, context_exceeded, invalid
from trunkline.v1.inference_pb2 import GenerateRequest, TokenIds
from trunkline.validation import context_words, max_total_tokens
from trunkline_router.edge.answering import answer_of, renamed
from trunkline_router.edge.http_call import HttpCall
from trunkline_router.edge.merging import merged
from trunkline_router.edge.request_fields import validated
from trunkline_router.openai.answer import AnswerId, CollectedAnswer
from trunkline_router.openai.chat_answer import ChatStream, chat_completion
from trunkline_router.openai.chat_request import ChatRequest
from trunkline_router.openai.completion_answer import CompletionStream, Echo, completion
from trunkline_router.openai.completion_request import CompletionRequest, Prompt
from trunkline_router.openai.logprobs import TokenNames
from trunkline_router.prompts.token_ids import read_ids
from trunkline_router.request.request_call import MAX_REQUEST_ID
from trunkline_router.request.steps import give_way
from trunkline_router.workers.pool import Pool

MAX_PROMPT_LOGPROBS = 1 << 17  # of one HTTP request


async def chat_completions(call: HttpCall) -> None:
    """POST /v1/chat/completions."""
    request: ChatRequest = validated(ChatRequest, await call.json())
    call.check_unknown(request.unknown())
    request.check()
    generate = request.generate_request(call.request_id)
    names, prompt_ids = None, None
    if request.logprobs or request.prompt_logprobs is not None or request.return_token_ids:
        pool = await call.edge.inference.found(generate.model, call.caller, None)
        names = await pool.tokenizer.token_bytes()
        if request.return_token_ids or request.prompt_logprobs is not None:
            prompt_ids = await _tokenized(call, pool, generate)
            check_logprobs(len(prompt_ids), request.prompt_logprobs, "prompt_logprobs")
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
    ids = [call.request_id]
    if len(prompts) > 1:  # room for a number within the longest request id
        ids = [f"{call.request_id[: MAX_REQUEST_ID - 4]}-{number}" for number in range(len(prompts))]
    generates = [request.generate_request(prompt, name) for prompt, name in zip(prompts, ids, strict=True)]
    names: TokenNames | None = None
    echoes = [Echo()] * len(prompts)
    if request.logprobs is not None or request.scores_prompt or request.return_token_ids or request.echo:
        pool = await call.edge.inference.found(request.model, call.caller, None)
        names = await pool.tokenizer.token_bytes()
        for index, generate in enumerate(generates):
            echoes[index] = await _echo(call, request, pool, prompts[index], generate)
        if request.scores_prompt:
            num_scored = sum(len(echo.token_ids) for echo in echoes) * (request.n or 1)
            check_logprobs(num_scored, max(request.logprobs or 0, request.prompt_logprobs or 0), "logprobs")
    elif request.add_special_tokens is False:
        pool = await call.edge.inference.found(request.model, call.caller, None)
        for generate in generates:
            await _tokenized(call, pool, generate, special_tokens=False)
    answer_id = AnswerId(f"cmpl-{call.request_id}", call.created, call.caller.identity.sees_cache)
    responses = merged([partial(answer_of, call, generate) for generate in generates])
    if request.stream:
        await call.stream(responses, CompletionStream(request, answer_id, echoes, names))
        return
    answers = [CollectedAnswer(request.n or 1) for _ in prompts]
    await call.collect(responses, lambda item: answers[item[0]].take(item[1]))
    await call.respond(completion(request, answer_id, answers, echoes, names))


def check_logprobs(num_tokens: int, num_top: int | None, field: str) -> None:
    """Raises RequestRefused (INVALID_REQUEST) if an answer would have more than MAX_PROMPT_LOGPROBS entries for prompt
    tokens, all choices together: writing one as JSON takes a microsecond and a half of the event loop."""
    if num_top is not None and num_tokens * (num_top + 1) > MAX_PROMPT_LOGPROBS:
        raise invalid(field, f"{num_tokens} prompt tokens have more than {MAX_PROMPT_LOGPROBS} log-probabilities")


async def _echo(
    call: HttpCall, request: CompletionRequest, pool: Pool, prompt: Prompt, generate: GenerateRequest
) -> Echo:
    """Returns the prompt as the answer repeats it. A text whose tokens are told is sent to workers as tokens."""
    caller = call.caller
    token_ids: Sequence[int] = prompt if not isinstance(prompt, str) else ()
    if isinstance(prompt, str) and (request.scores_prompt or request.return_token_ids):
        token_ids = await _tokenized(call, pool, generate, special_tokens=request.add_special_tokens is not False)
    if not request.echo:
        return Echo(token_ids=token_ids)
    if isinstance(prompt, str):
        return Echo(prompt, token_ids)
    most_tokens = max_total_tokens(pool.limits)
    if len(token_ids) >= most_tokens:
        raise context_exceeded(f"the prompt's {len(token_ids)} tokens do not fit: {context_words(most_tokens)}")
    try:
        ids = await read_ids(token_ids, vocab_size=pool.limits.vocab_size, field="prompt")
        utf8 = await pool.tokenizer.decode(ids, keep_special=True, tenant=caller.tenant, weight=caller.terms.weight)
    except RequestRefused as refused:
        raise renamed(refused) from None
    return Echo(utf8.decode(), token_ids)


async def _tokenized(
    call: HttpCall, pool: Pool, generate: GenerateRequest, *, special_tokens: bool = True
) -> Sequence[int]:
    """Replaces the request's text or conversation by its tokens, and returns them. Raises RequestRefused."""
    caller, tokenizer, most_tokens = call.caller, pool.tokenizer, max_total_tokens(pool.limits)
    tenant, weight = caller.tenant, caller.terms.weight
    try:
        if generate.WhichOneof("prompt") == "chat":
            ids = await tokenizer.encode_chat(generate.chat, most_tokens, tenant=tenant, weight=weight)
        else:
            text = generate.text
            if not text:
                raise invalid("prompt", "is empty")
            await give_way(len(text))
            tokenizer.check_fits(text, most_tokens)
            ids = await tokenizer.encode(text, special_tokens=special_tokens, tenant=tenant, weight=weight)
    except RequestRefused as refused:
        raise renamed(refused) from None
    generate.token_ids.CopyFrom(TokenIds(ids=ids))
    return ids

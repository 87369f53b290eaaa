"""POST /tokenize and /detokenize, with vLLM's fields."""

from typing import Annotated, Any, ClassVar

import orjson
from pydantic import Field

from trunkline.status import RequestRefused, invalid
from trunkline.v1.inference_pb2 import DetokenizeRequest, TokenizeRequest
from trunkline.validation import max_total_tokens
from trunkline_router.edge.field_names import renamed
from trunkline_router.edge.http_call import HttpCall
from trunkline_router.edge.request_fields import Fields, Integers, token_ids, validated
from trunkline_router.openai.chat_request import FIELD_NAMES as CHAT_NAMES
from trunkline_router.openai.chat_request import Message, conversation
from trunkline_router.prompts.chat_template import MAX_MESSAGES


# What refusals name.
TEXT_NAMES, TOKEN_NAMES = {"text": "prompt"}, {"token_ids": "tokens"}


class TokenizeBody(Fields):
    """A text or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeBody(Fields):
    """Token ids."""

    model: str | None = None
    tokens: Integers

    long_lists: ClassVar[frozenset[str]] = frozenset({"tokens"})


async def tokenize(call: HttpCall) -> None:
    """POST /tokenize."""
    body: TokenizeBody = validated(TokenizeBody, await call.json())
    call.check_unknown(body.unknown())
    if (body.prompt is None) == (body.messages is None):
        raise invalid("prompt", "exactly one of prompt and messages must be given")
    request = TokenizeRequest(model=body.model or "", omit_special_tokens=body.add_special_tokens is False)
    if body.messages is not None:
        if body.add_special_tokens:
            raise invalid("add_special_tokens", "is for prompts: a chat template writes the special tokens itself")
        request.chat.CopyFrom(
            conversation(
                body.messages,
                add_generation_prompt=body.add_generation_prompt,
                continue_final_message=body.continue_final_message,
                chat_template_kwargs=body.chat_template_kwargs,
            )
        )
    else:
        request.text = body.prompt or ""
    inference = call.edge.inference
    try:
        ids = await inference.tokenize(request, call.caller, None)
    except RequestRefused as refused:
        raise renamed(refused, TEXT_NAMES if body.messages is None else CHAT_NAMES) from None
    pool = await inference.found(request.model, call.caller, None)
    answer: dict[str, Any] = {"count": len(ids), "max_model_len": max_total_tokens(pool.limits), "tokens": list(ids)}
    if body.return_token_strs:
        names = await pool.tokenizer.token_bytes()
        answer["token_strs"] = [names.text(token_id) for token_id in ids]
    await call.respond(orjson.dumps(answer))


async def detokenize(call: HttpCall) -> None:
    """POST /detokenize."""
    body: DetokenizeBody = validated(DetokenizeBody, await call.json())
    call.check_unknown(body.unknown())
    request = DetokenizeRequest(model=body.model or "", token_ids=token_ids("tokens", body.tokens))
    try:
        utf8 = await call.edge.inference.detokenize(request, call.caller, None)
    except RequestRefused as refused:
        raise renamed(refused, TOKEN_NAMES) from None
    await call.respond(orjson.dumps({"prompt": utf8.decode()}))

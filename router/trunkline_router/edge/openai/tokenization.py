"""POST /tokenize and /detokenize, with vLLM's fields."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, ClassVar

import orjson
from pydantic import Field, WithJsonSchema

from trunkline.status import RequestRefused, invalid
from trunkline.v1.inference_pb2 import TokenizeRequest
from trunkline.validation import max_total_tokens
from trunkline_router.edge.field_names import renamed
from trunkline_router.edge.http_call import HttpCall
from trunkline_router.edge.long_lists import json_list, packed
from trunkline_router.edge.openai.chat_request import FIELD_NAMES as CHAT_NAMES
from trunkline_router.edge.openai.chat_request import Message, conversation
from trunkline_router.edge.request_fields import Fields, validated
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

    def tokenize_request(self) -> TokenizeRequest:
        """Returns the request. Raises RequestRefused (INVALID_REQUEST)."""
        if (self.prompt is None) == (self.messages is None):
            raise invalid("prompt", "exactly one of prompt and messages must be given")
        request = TokenizeRequest(model=self.model or "", omit_special_tokens=self.add_special_tokens is False)
        if self.messages is None:
            request.text = self.prompt or ""
            return request
        if self.add_special_tokens:
            raise invalid("add_special_tokens", "is for prompts: a chat template writes the special tokens itself")
        chat = conversation(
            self.messages,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            chat_template_kwargs=self.chat_template_kwargs,
        )
        request.chat.CopyFrom(chat)
        return request


class DetokenizeBody(Fields):
    """Token ids."""

    model: str | None = None
    tokens: Annotated[Any, WithJsonSchema({"type": "array", "items": {"type": "integer", "minimum": 0}})]

    long_lists: ClassVar[frozenset[str]] = frozenset({"tokens"})


async def tokenize(call: HttpCall) -> None:
    """POST /tokenize."""
    async with call.json() as given:
        body: TokenizeBody = validated(TokenizeBody, given)
        call.check_unknown(body.unknown())
        request = body.tokenize_request()
    inference = call.edge.inference
    try:
        ids = await inference.tokenize(request, call.caller, None)
    except RequestRefused as refused:
        raise renamed(refused, TEXT_NAMES if body.messages is None else CHAT_NAMES) from None
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
        with _tokens_named():
            await inference.detokenizing_pool(model, len(body.tokens), call.caller)  # before an id is looked at
        ids = await packed(body.tokens, "tokens")
    with _tokens_named():
        utf8 = await inference.detokenize(model, ids, call.caller, None)
    await call.respond(orjson.dumps({"prompt": utf8.decode()}))


@contextmanager
def _tokens_named() -> Iterator[None]:
    """Names the tokens in refusals as the body does."""
    try:
        yield
    except RequestRefused as refused:
        raise renamed(refused, TOKEN_NAMES) from None

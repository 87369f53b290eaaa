"""OpenAI's list of models, and vLLM's /tokenize and /detokenize."""

from datetime import UTC, datetime
from typing import Annotated, Any, ClassVar

import orjson
from pydantic import WithJsonSchema

from trunkline.capabilities import name_of
from trunkline.status import CODE_NOT_FOUND, MODEL_NOT_FOUND, RequestRefused, invalid
from trunkline.v1.inference_pb2 import TokenizeRequest
from trunkline.validation import max_total_tokens
from trunkline_router.edge.http.json_body import json_list, packed
from trunkline_router.edge.http_call import HttpCall
from trunkline_router.edge.openai.chat_fields import CHAT_NAMES, ChatFields
from trunkline_router.edge.openai.completion_request import COMPLETION_NAMES, IDS_SCHEMA
from trunkline_router.edge.request_fields import FieldNames, Fields, Steps, prompt_named, refusals_named
from trunkline_router.workers.pool import Pool

OWNER = "trunkline"
CREATED_S = 0  # workers do not tell when a model was made


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
        "task": name_of(pool.task),
        "type": "model",
        "display_name": name,
        "created_at": datetime.fromtimestamp(CREATED_S, UTC).isoformat().replace("+00:00", "Z"),
    }


class TokenizeBody(ChatFields):
    """A text or a conversation."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    @property
    def field_names(self) -> FieldNames:
        """What refusals name."""
        return COMPLETION_NAMES if self.messages is None else CHAT_NAMES

    def check(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise invalid("prompt", "exactly one of prompt and messages must be given")
        if self.messages is not None and self.add_special_tokens:
            raise invalid("add_special_tokens", "is for prompts: a chat template writes the special tokens itself")

    def tokenize_request(self) -> Steps[TokenizeRequest]:
        """Returns the request. Raises RequestRefused (INVALID_REQUEST)."""
        request = TokenizeRequest(model=self.model or "", omit_special_tokens=self.add_special_tokens is False)
        if self.messages is None:
            request.text = self.prompt or ""
        else:
            request.chat.CopyFrom((yield from self.chat()))
        return request


class DetokenizeBody(Fields):
    """Token ids."""

    model: str | None = None
    tokens: Annotated[Any, WithJsonSchema(IDS_SCHEMA)]

    long_lists: ClassVar[frozenset[str]] = frozenset({"tokens"})

    def check(self) -> None:
        if not isinstance(self.tokens, list):
            raise invalid("tokens", "must be a list of token ids")


async def tokenize(call: HttpCall) -> None:
    """POST /tokenize."""
    body = await call.body(TokenizeBody)
    request = await call.converted(body, body.tokenize_request())
    inference = call.edge.inference
    with refusals_named(body.field_names):
        ids = await inference.tokenize(request, call.caller, None)
    pool = await inference.preparer.pool(request.model, call.caller, None)
    answer = {"count": len(ids), "max_model_len": max_total_tokens(pool.limits), "tokens": await json_list(ids)}
    if body.return_token_strs:
        answer["token_strs"] = await json_list(ids, (await pool.tokenizer.token_bytes()).text)
    await call.respond(orjson.dumps(answer))


async def detokenize(call: HttpCall) -> None:
    """POST /detokenize."""
    body = await call.body(DetokenizeBody)
    inference, model = call.edge.inference, body.model or ""
    with refusals_named(prompt_named("tokens")):
        await inference.detokenizing_pool(model, len(body.tokens), call.caller)  # before an id is looked at
        ids = packed(body.tokens, "tokens")
        body.tokens.clear()  # they take several times as much memory as `ids`
        utf8 = await inference.detokenize(model, ids, call.caller, None)
    await call.respond(orjson.dumps({"prompt": utf8.decode()}))

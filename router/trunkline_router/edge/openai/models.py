"""GET /v1/models and /v1/models/{id}, in a shape that OpenAI's and Anthropic's clients read."""

from datetime import UTC, datetime
from typing import Any

import orjson

from trunkline.status import CODE_NOT_FOUND, MODEL_NOT_FOUND, RequestRefused
from trunkline.validation import max_total_tokens
from trunkline_router.edge.http_call import HttpCall
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
        "type": "model",
        "display_name": name,
        "created_at": datetime.fromtimestamp(CREATED_S, UTC).isoformat().replace("+00:00", "Z"),
    }

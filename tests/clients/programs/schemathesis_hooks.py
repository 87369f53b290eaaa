"""What schemathesis changes in the requests that it makes up: they name the model that is served, and ask for short
answers. So most of them reach the model, and a run takes a minute instead of an hour."""

import os
from typing import Any

import schemathesis

MOST_TOKENS = 4
LIMITS = {
    "/completions": "max_tokens",
    "/chat/completions": "max_tokens",
    "/responses": "max_output_tokens",
    "/messages": "max_tokens",
}


@schemathesis.hook
def before_call(context: schemathesis.HookContext, case: schemathesis.Case[Any], kwargs: dict[str, Any]) -> None:
    body: Any = case.body
    if case.method != "POST" or not isinstance(body, dict):
        return
    if isinstance(body.get("model"), str):
        body["model"] = os.environ["TRUNKLINE_TEST_MODEL"]
    limit = LIMITS.get(case.path.removeprefix("/v1"))
    if limit is None:
        return
    named = {limit, "max_completion_tokens"} & body.keys()
    for name in named:
        if isinstance(body[name], int) and body[name] > MOST_TOKENS:
            body[name] = MOST_TOKENS
    if not named:
        body[limit] = MOST_TOKENS

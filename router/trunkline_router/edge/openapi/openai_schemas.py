"""What the endpoints answer that have OpenAI's or vLLM's shape, but for /v1/responses."""

from trunkline_router.edge.openapi.schema_parts import (
    INTEGER,
    NULL,
    NUMBER,
    STRING,
    Schema,
    array,
    component,
    constant,
    mapping,
    nullable,
    one_of,
    record,
)

FINISH_REASON = {**one_of("stop", "length", "abort"), "description": "abort: cancelled at the worker"}
# What ended a choice: a text, a token, or neither, as in vLLM.
STOP_REASON: Schema = {"type": ["string", "integer", "null"], "description": "the stop string or stop token"}
TOKEN_IDS = array(INTEGER)
PROMPT_LOGPROBS = array(
    nullable(mapping(record({"logprob": NUMBER, "rank": INTEGER, "decoded_token": STRING}))),
    description="for each token of the prompt null, or its and the likeliest tokens' values by token id",
)
TOKEN = {"token": STRING, "logprob": NUMBER, "bytes": array(INTEGER)}
TOKEN_LOGPROBS = array(record({**TOKEN, "top_logprobs": array(record(TOKEN))}))
USAGE = record(
    {"prompt_tokens": INTEGER, "completion_tokens": INTEGER, "total_tokens": INTEGER},
    {"prompt_tokens_details": record({"cached_tokens": INTEGER})},
    description="prompt_tokens_details is absent if the caller may not see what came from the cache",
)
ANSWER = {"id": STRING, "created": {**INTEGER, "description": "in seconds since 1970"}, "model": STRING}

SCHEMAS: dict[str, Schema] = {
    "Error": record(
        {
            "error": record(
                {"message": STRING, "type": STRING, "param": nullable(STRING), "code": STRING},
                description="code: the reason; param: the wrong field",
            )
        }
    ),
    "Usage": USAGE,
    "Completion": record(
        {
            **ANSWER,
            "object": constant("text_completion"),
            "choices": array(
                record(
                    {
                        "index": INTEGER,
                        "text": STRING,
                        "logprobs": nullable(
                            record(
                                {
                                    "text_offset": array(INTEGER),
                                    "token_logprobs": array(nullable(NUMBER)),
                                    "tokens": array(STRING),
                                    "top_logprobs": array(nullable(mapping(NUMBER))),
                                }
                            )
                        ),
                        "finish_reason": FINISH_REASON,
                        "stop_reason": STOP_REASON,
                    },
                    {"prompt_logprobs": PROMPT_LOGPROBS, "prompt_token_ids": TOKEN_IDS, "token_ids": TOKEN_IDS},
                )
            ),
            "usage": component("Usage"),
        }
    ),
    "ChatCompletion": record(
        {
            **ANSWER,
            "object": constant("chat.completion"),
            "choices": array(
                record(
                    {
                        "index": INTEGER,
                        "message": record(
                            {
                                "role": constant("assistant"),
                                "content": STRING,
                                "refusal": NULL,
                                "annotations": array({}, maxItems=0),
                            }
                        ),
                        "logprobs": nullable(record({"content": TOKEN_LOGPROBS, "refusal": NULL})),
                        "finish_reason": FINISH_REASON,
                        "stop_reason": STOP_REASON,
                    },
                    {"token_ids": TOKEN_IDS},
                )
            ),
            "usage": component("Usage"),
        },
        {"prompt_logprobs": PROMPT_LOGPROBS, "prompt_token_ids": TOKEN_IDS},
    ),
    "Model": record(
        {
            "id": STRING,
            "object": constant("model"),
            "created": INTEGER,
            "owned_by": STRING,
            "root": STRING,
            "parent": NULL,
            "max_model_len": {**INTEGER, "description": "most tokens of prompt and output together"},
            "type": constant("model"),
            "display_name": STRING,
            "created_at": {**STRING, "format": "date-time"},
        },
        description="what OpenAI's, Anthropic's and vLLM's clients read; workers do not tell when a model was made",
    ),
    "ModelList": record(
        {
            "object": constant("list"),
            "data": array(component("Model")),
            "has_more": constant(False),
            "first_id": nullable(STRING),
            "last_id": nullable(STRING),
        }
    ),
    "Tokens": record({"count": INTEGER, "max_model_len": INTEGER, "tokens": TOKEN_IDS}, {"token_strs": array(STRING)}),
    "Text": record({"prompt": STRING}),
    "Status": record({"status": STRING}),
    "Version": record({"version": STRING}),
}

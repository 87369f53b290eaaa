"""What the endpoints under /v1/responses answer."""

from trunkline_router.edge.openapi.openai_schemas import TOKEN_LOGPROBS
from trunkline_router.edge.openapi.schema_parts import (
    BOOLEAN,
    INTEGER,
    NULL,
    NUMBER,
    STRING,
    Schema,
    array,
    constant,
    mapping,
    nullable,
    one_of,
    record,
)

NONE = array({}, maxItems=0)
PART = record({"type": constant("output_text"), "text": STRING, "annotations": NONE, "logprobs": TOKEN_LOGPROBS})
ITEM = record(
    {
        "id": STRING,
        "type": constant("message"),
        "status": one_of("completed", "incomplete"),
        "role": constant("assistant"),
        "content": array(PART),
    }
)
USAGE = record(
    {
        "input_tokens": INTEGER,
        "input_tokens_details": record({"cached_tokens": INTEGER, "cache_write_tokens": INTEGER}),
        "output_tokens": INTEGER,
        "output_tokens_details": record({"reasoning_tokens": INTEGER}),
        "total_tokens": INTEGER,
    }
)

SCHEMAS: dict[str, Schema] = {
    "Response": record(
        {
            "id": STRING,
            "object": constant("response"),
            "created_at": INTEGER,
            "completed_at": nullable(INTEGER),
            "status": one_of("completed", "incomplete", "failed", "in_progress"),
            "incomplete_details": nullable(record({"reason": constant("max_output_tokens")})),
            "error": nullable(record({"code": STRING, "message": STRING})),
            "model": STRING,
            "instructions": nullable(STRING),
            "previous_response_id": nullable(STRING),
            "output": array(ITEM),
            "usage": nullable(USAGE),
            "temperature": NUMBER,
            "top_p": NUMBER,
            "presence_penalty": NUMBER,
            "frequency_penalty": NUMBER,
            "top_logprobs": INTEGER,
            "max_output_tokens": nullable(INTEGER),
            "text": record({"format": record({"type": constant("text")})}),
            "reasoning": record({"effort": NULL, "summary": NULL}),
            "tools": NONE,
            "tool_choice": one_of("auto", "none"),
            "parallel_tool_calls": BOOLEAN,
            "max_tool_calls": NULL,
            "truncation": constant("disabled"),
            "store": BOOLEAN,
            "background": constant(False),
            "service_tier": constant("default"),
            "metadata": mapping(STRING),
            "safety_identifier": nullable(STRING),
            "prompt_cache_key": nullable(STRING),
            "user": nullable(STRING),
        }
    ),
    "DeletedResponse": record({"id": STRING, "object": constant("response"), "deleted": constant(True)}),
}

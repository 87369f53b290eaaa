"""What the endpoints under /v1/messages answer."""

from trunkline_router.edge.openapi.schema_parts import (
    INTEGER,
    NULL,
    STRING,
    Schema,
    array,
    constant,
    nullable,
    one_of,
    record,
)

SCHEMAS: dict[str, Schema] = {
    "MessagesError": record(
        {
            "type": constant("error"),
            "error": record({"type": STRING, "message": STRING}),
            "request_id": nullable(STRING),
        }
    ),
    "MessageAnswer": record(
        {
            "id": STRING,
            "type": constant("message"),
            "role": constant("assistant"),
            "model": STRING,
            "content": array(
                record({"type": constant("text"), "text": STRING, "citations": NULL}), minItems=1, maxItems=1
            ),
            "stop_reason": one_of("end_turn", "max_tokens", "stop_sequence", "model_context_window_exceeded"),
            "stop_sequence": nullable(STRING),
            "stop_details": NULL,
            "container": NULL,
            "usage": record(
                {
                    "input_tokens": {**INTEGER, "description": "without those that came from the cache"},
                    "cache_creation_input_tokens": INTEGER,
                    "cache_read_input_tokens": INTEGER,
                    "output_tokens": INTEGER,
                    "output_tokens_details": NULL,
                    "server_tool_use": NULL,
                    "cache_creation": NULL,
                    "inference_geo": NULL,
                    "service_tier": constant("standard"),
                }
            ),
        }
    ),
    "TokenCount": record({"input_tokens": INTEGER}),
}

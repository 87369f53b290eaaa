"""Schemas of answers (JSON schema, draft 2020-12, which OpenAPI 3.1 uses)."""

from collections.abc import Mapping
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from trunkline.v1.fleet_pb2 import (
    DrainWorkerResponse,
    GetRequestResponse,
    ListRequestsResponse,
    RequestSummary,
    UndrainWorkerResponse,
    WatchFleetResponse,
)
from trunkline_router.edge.live.fleet_json import words_of

Schema = dict[str, Any]

STRING: Schema = {"type": "string"}
INTEGER: Schema = {"type": "integer"}
NUMBER: Schema = {"type": "number"}
BOOLEAN: Schema = {"type": "boolean"}
NULL: Schema = {"type": "null"}


def component(name: str) -> Schema:
    """A reference to a schema of the page's components."""
    return {"$ref": f"#/components/schemas/{name}"}


def constant(value: object) -> Schema:
    return {"const": value}


def one_of(*values: str | None) -> Schema:
    """One of these texts, or null."""
    return {"enum": list(values)}


def nullable(schema: Schema) -> Schema:
    return {"anyOf": [schema, NULL]}


def array(items: Schema, **more: Any) -> Schema:
    return {"type": "array", "items": items, **more}


def mapping(values: Schema) -> Schema:
    """An object with any names."""
    return {"type": "object", "additionalProperties": values}


def record(properties: Mapping[str, Schema], optional: Mapping[str, Schema] | None = None, **more: Any) -> Schema:
    """An object. It has `properties` in any case. Later versions may add others, so clients must not refuse them."""
    named = {**properties, **(optional or {})}
    return {"type": "object", "properties": named, "required": list(properties), **more}


NONE = array({}, maxItems=0)

# OpenAI's and vLLM's shapes.
ENDING: dict[str, Schema] = {
    "finish_reason": {**one_of("stop", "length", "abort"), "description": "abort: cancelled at the worker"},
    # What ended a choice: a text, a token, or neither, as in vLLM.
    "stop_reason": {"type": ["string", "integer", "null"], "description": "the stop string or stop token"},
}
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
COLUMNS = record(
    {
        "text_offset": array(INTEGER),
        "token_logprobs": array(nullable(NUMBER)),
        "tokens": array(STRING),
        "top_logprobs": array(nullable(mapping(NUMBER))),
    }
)
CHAT_MESSAGE = record({"role": constant("assistant"), "content": STRING, "refusal": NULL, "annotations": NONE})
ANSWER = {
    "id": STRING,
    "created": {**INTEGER, "description": "in seconds since 1970"},
    "model": STRING,
    "usage": component("Usage"),
}

OPENAI_SCHEMAS: dict[str, Schema] = {
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
                    {"index": INTEGER, "text": STRING, "logprobs": nullable(COLUMNS), **ENDING},
                    {"prompt_logprobs": PROMPT_LOGPROBS, "prompt_token_ids": TOKEN_IDS, "token_ids": TOKEN_IDS},
                )
            ),
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
                        "message": CHAT_MESSAGE,
                        "logprobs": nullable(record({"content": TOKEN_LOGPROBS, "refusal": NULL})),
                        **ENDING,
                    },
                    {"token_ids": TOKEN_IDS},
                )
            ),
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

# /v1/responses
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
RESPONSE_USAGE = record(
    {
        "input_tokens": INTEGER,
        "input_tokens_details": record({"cached_tokens": INTEGER, "cache_write_tokens": INTEGER}),
        "output_tokens": INTEGER,
        "output_tokens_details": record({"reasoning_tokens": INTEGER}),
        "total_tokens": INTEGER,
    }
)

RESPONSE_SCHEMAS: dict[str, Schema] = {
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
            "usage": nullable(RESPONSE_USAGE),
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

# /v1/messages
MESSAGE_SCHEMAS: dict[str, Schema] = {
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


# /fleet: the messages of FleetService, as live/fleet_json.py writes them.
_CPP = FieldDescriptor
_KINDS = {
    _CPP.CPPTYPE_STRING: STRING,
    _CPP.CPPTYPE_BOOL: BOOLEAN,
    _CPP.CPPTYPE_DOUBLE: {"anyOf": [NUMBER, NULL]},  # null: not a number that JSON has
    _CPP.CPPTYPE_UINT32: INTEGER,
    _CPP.CPPTYPE_UINT64: INTEGER,
}


def _fleet_schemas() -> dict[str, Schema]:
    """The schema of each message, by its name."""
    found: dict[str, Descriptor] = {}
    answers = WatchFleetResponse, GetRequestResponse, DrainWorkerResponse, UndrainWorkerResponse
    open_ = [message.DESCRIPTOR for message in answers]
    while open_:
        descriptor = open_.pop()
        if descriptor.name not in found:
            found[descriptor.name] = descriptor
            open_ += [field.message_type for field in descriptor.fields if field.message_type is not None]
    return {name: record(_properties(descriptor)) for name, descriptor in sorted(found.items())}


def _properties(descriptor: Descriptor) -> dict[str, Schema]:
    return {field.name: _field(field) for field in descriptor.fields}


def _field(field: FieldDescriptor) -> Schema:
    if field.message_type is not None:
        value = component(field.message_type.name)
    elif field.enum_type is not None:
        value = one_of(*words_of(field.enum_type).values(), "unknown")
    else:
        value = _KINDS[field.cpp_type]
    if field.is_repeated:
        return array(value)
    return nullable(value) if field.has_presence else value


def _story() -> Schema:
    """A timeline has the fields of its summary beside its own."""
    own = _properties(GetRequestResponse.DESCRIPTOR)
    del own["summary"]
    return record({**_properties(RequestSummary.DESCRIPTOR), **own})


SCHEMAS: dict[str, Schema] = {
    **OPENAI_SCHEMAS,
    **RESPONSE_SCHEMAS,
    **MESSAGE_SCHEMAS,
    **_fleet_schemas(),
    "RequestStory": _story(),
    "RequestList": record(_properties(ListRequestsResponse.DESCRIPTOR)),
}

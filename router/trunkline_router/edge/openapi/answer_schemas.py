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


def one_of(*values: object) -> Schema:
    return {"enum": list(values)}


def nullable(schema: Schema) -> Schema:
    return {"anyOf": [schema, NULL]}


def array(items: Schema, **more: Any) -> Schema:
    return {"type": "array", "items": items, **more}


def mapping(values: Schema) -> Schema:
    """An object with any names."""
    return {"type": "object", "additionalProperties": values}


def record(fields: Mapping[str, Schema], **more: Any) -> Schema:
    """An object. Later versions may add fields, so clients must not refuse unknown ones.

    fields: by their names, separated by blanks; a name with a question mark may be absent
    """
    named = {name: schema for names, schema in fields.items() for name in names.split()}
    properties = {name.rstrip("?"): schema for name, schema in named.items()}
    required = [name for name in named if not name.endswith("?")]
    return {"type": "object", "properties": properties, "required": required, **more}


NONE = array({}, maxItems=0)

# OpenAI's and vLLM's shapes.
TOKEN_IDS = array(INTEGER)
PROMPT_LOGPROBS = array(
    nullable(mapping(record({"logprob": NUMBER, "rank": INTEGER, "decoded_token": STRING}))),
    description="for each token of the prompt null, or its and the likeliest tokens' values by token id",
)
CHOICE: dict[str, Schema] = {
    "index": INTEGER,
    "finish_reason": {**one_of("stop", "length", "abort"), "description": "abort: cancelled at the worker"},
    # What ended a choice: a text, a token, or neither, as in vLLM.
    "stop_reason": {"type": ["string", "integer", "null"], "description": "the stop string or stop token"},
    "token_ids?": TOKEN_IDS,
}
TOKEN = {"token": STRING, "logprob": NUMBER, "bytes": array(INTEGER)}
TOKEN_LOGPROBS = array(record({**TOKEN, "top_logprobs": array(record(TOKEN))}))
COLUMNS = record(
    {
        "text_offset": array(INTEGER),
        "tokens": array(STRING),
        "token_logprobs": array(nullable(NUMBER)),
        "top_logprobs": array(nullable(mapping(NUMBER))),
    }
)
CHAT_MESSAGE = record({"role": one_of("assistant"), "content": STRING, "refusal": NULL, "annotations": NONE})
ANSWER = {
    "id model": STRING,
    "created": {**INTEGER, "description": "in seconds since 1970"},
    "usage": component("Usage"),
}

OPENAI_SCHEMAS: dict[str, Schema] = {
    "Error": record(
        {
            "error": record(
                {"message type code": STRING, "param": nullable(STRING)},
                description="code: the reason; param: the wrong field",
            )
        }
    ),
    "Usage": record(
        {
            "prompt_tokens completion_tokens total_tokens": INTEGER,
            "prompt_tokens_details?": record({"cached_tokens": INTEGER}),
        },
        description="prompt_tokens_details is absent if the caller may not see what came from the cache",
    ),
    "Completion": record(
        {
            **ANSWER,
            "object": one_of("text_completion"),
            "choices": array(
                record(
                    {
                        **CHOICE,
                        "text": STRING,
                        "logprobs": nullable(COLUMNS),
                        "prompt_logprobs?": PROMPT_LOGPROBS,
                        "prompt_token_ids?": TOKEN_IDS,
                    }
                )
            ),
        }
    ),
    "ChatCompletion": record(
        {
            **ANSWER,
            "object": one_of("chat.completion"),
            "choices": array(
                record(
                    {
                        **CHOICE,
                        "message": CHAT_MESSAGE,
                        "logprobs": nullable(record({"content": TOKEN_LOGPROBS, "refusal": NULL})),
                    }
                )
            ),
            "prompt_logprobs?": PROMPT_LOGPROBS,
            "prompt_token_ids?": TOKEN_IDS,
        }
    ),
    "Model": record(
        {
            "id owned_by root display_name": STRING,
            "object type": one_of("model"),
            "created": INTEGER,
            "created_at": {**STRING, "format": "date-time"},
            "max_model_len": {**INTEGER, "description": "most tokens of prompt and output together"},
            "parent": NULL,
        },
        description="what OpenAI's, Anthropic's and vLLM's clients read; workers do not tell when a model was made",
    ),
    "ModelList": record(
        {
            "object": one_of("list"),
            "data": array(component("Model")),
            "has_more": one_of(False),
            "first_id last_id": nullable(STRING),
        }
    ),
    "Tokens": record({"count max_model_len": INTEGER, "tokens": TOKEN_IDS, "token_strs?": array(STRING)}),
    "Text": record({"prompt": STRING}),
    "Status": record({"status": STRING}),
    "Version": record({"version": STRING}),
}

# /v1/responses
PART = record({"type": one_of("output_text"), "text": STRING, "annotations": NONE, "logprobs": TOKEN_LOGPROBS})
ITEM = record(
    {
        "id": STRING,
        "type": one_of("message"),
        "status": one_of("completed", "incomplete"),
        "role": one_of("assistant"),
        "content": array(PART),
    }
)
RESPONSE_USAGE = record(
    {
        "input_tokens output_tokens total_tokens": INTEGER,
        "input_tokens_details": record({"cached_tokens cache_write_tokens": INTEGER}),
        "output_tokens_details": record({"reasoning_tokens": INTEGER}),
    }
)

RESPONSE_SCHEMAS: dict[str, Schema] = {
    "Response": record(
        {
            "id model": STRING,
            "object": one_of("response"),
            "created_at top_logprobs": INTEGER,
            "completed_at max_output_tokens": nullable(INTEGER),
            "status": one_of("completed", "incomplete", "failed", "in_progress"),
            "incomplete_details": nullable(record({"reason": one_of("max_output_tokens")})),
            "error": nullable(record({"code message": STRING})),
            "instructions previous_response_id safety_identifier prompt_cache_key user": nullable(STRING),
            "output": array(ITEM),
            "usage": nullable(RESPONSE_USAGE),
            "temperature top_p presence_penalty frequency_penalty": NUMBER,
            "text": record({"format": record({"type": one_of("text")})}),
            "reasoning": record({"effort summary": NULL}),
            "tools": NONE,
            "tool_choice": one_of("auto", "none"),
            "parallel_tool_calls store": BOOLEAN,
            "max_tool_calls": NULL,
            "truncation": one_of("disabled"),
            "background": one_of(False),
            "service_tier": one_of("default"),
            "metadata": mapping(STRING),
        }
    ),
    "DeletedResponse": record({"id": STRING, "object": one_of("response"), "deleted": one_of(True)}),
}

# /v1/messages
TEXT_BLOCK = record({"type": one_of("text"), "text": STRING, "citations": NULL})
MESSAGE_USAGE = record(
    {
        "input_tokens": {**INTEGER, "description": "without those that came from the cache"},
        "cache_creation_input_tokens cache_read_input_tokens output_tokens": INTEGER,
        "output_tokens_details server_tool_use cache_creation inference_geo": NULL,
        "service_tier": one_of("standard"),
    }
)
MESSAGE_SCHEMAS: dict[str, Schema] = {
    "MessagesError": record(
        {"type": one_of("error"), "error": record({"type message": STRING}), "request_id": nullable(STRING)}
    ),
    "MessageAnswer": record(
        {
            "id model": STRING,
            "type": one_of("message"),
            "role": one_of("assistant"),
            "content": array(TEXT_BLOCK, minItems=1, maxItems=1),
            "stop_reason": one_of("end_turn", "max_tokens", "stop_sequence", "model_context_window_exceeded"),
            "stop_sequence": nullable(STRING),
            "stop_details container": NULL,
            "usage": MESSAGE_USAGE,
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


def _fields(message: Descriptor) -> dict[str, Schema]:
    return {field.name: _field(field) for field in message.fields}


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


def _fleet_schemas(*answers: Descriptor) -> dict[str, Schema]:
    """The schema of each message that the answers have, by its name."""
    found: dict[str, Schema] = {}
    waiting = list(answers)
    while waiting:
        message = waiting.pop()
        if message.name not in found:
            found[message.name] = record(_fields(message))
            waiting += [field.message_type for field in message.fields if field.message_type is not None]
    return found


# A timeline has the fields of its summary beside its own.
_STORY = {**_fields(RequestSummary.DESCRIPTOR), **_fields(GetRequestResponse.DESCRIPTOR)}
del _STORY["summary"]

SCHEMAS: dict[str, Schema] = {
    **OPENAI_SCHEMAS,
    **RESPONSE_SCHEMAS,
    **MESSAGE_SCHEMAS,
    **_fleet_schemas(
        WatchFleetResponse.DESCRIPTOR,
        GetRequestResponse.DESCRIPTOR,
        DrainWorkerResponse.DESCRIPTOR,
        UndrainWorkerResponse.DESCRIPTOR,
    ),
    "RequestStory": record(_STORY),
    "RequestList": record(_fields(ListRequestsResponse.DESCRIPTOR)),
}

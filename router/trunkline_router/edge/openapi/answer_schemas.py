"""Schemas of answers (JSON schema, draft 2020-12, which OpenAPI 3.1 uses).

An answer's shape is written as its JSON looks: {…} is an object, [x] a list of x, (a, b) one of these values, None is
null, and a type any of its values. Names of one shape share a key; one with a question mark may be absent.
"""

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

Shape = Any
TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", None: "null"}


class Schema(dict[str, Any]):
    """A JSON schema. As a shape, it is what it is."""


def schema_of(shape: Shape) -> Schema:
    """Returns the schema. Objects may have further names: later versions add some, so clients must not refuse them."""
    if isinstance(shape, Schema):
        return shape
    if isinstance(shape, list):
        return Schema(type="array", items=schema_of(shape[0]))
    if isinstance(shape, tuple):
        return Schema(enum=list(shape))
    if not isinstance(shape, dict):
        return Schema(type=TYPES[shape])
    named = {name: schema_of(inner) for names, inner in shape.items() for name in names.split()}
    properties = {name.rstrip("?"): inner for name, inner in named.items()}
    return Schema(type="object", properties=properties, required=[name for name in named if not name.endswith("?")])


def component(name: str) -> Schema:
    """A reference to a schema of the page's components."""
    return Schema({"$ref": f"#/components/schemas/{name}"})


def described(shape: Shape, description: str) -> Schema:
    return Schema(schema_of(shape), description=description)


def nullable(shape: Shape) -> Schema:
    return Schema(anyOf=[schema_of(shape), schema_of(None)])


def one_of(*shapes: Shape) -> Schema:
    """Any of these shapes, of which no two fit one value."""
    return Schema(oneOf=[schema_of(shape) for shape in shapes])


def mapping(values: Shape) -> Schema:
    """An object with any names."""
    return Schema(type="object", additionalProperties=schema_of(values))


NOTHING = Schema(type="array", items={}, maxItems=0)

# OpenAI's and vLLM's shapes.
PROMPT_LOGPROBS = described(
    [nullable(mapping({"logprob": float, "rank": int, "decoded_token": str}))],
    "for each token of the prompt null, or its and the likeliest tokens' values by token id",
)
CHOICE = {
    "index": int,
    "finish_reason": described(("stop", "length", "abort"), "abort: cancelled at the worker"),
    # What ended a choice: a text, a token, or neither, as in vLLM.
    "stop_reason": Schema(type=["string", "integer", "null"], description="the stop string or stop token"),
    "token_ids?": [int],
}
PROMPT_DETAILS = {"prompt_logprobs?": PROMPT_LOGPROBS, "prompt_token_ids?": [int]}
TOKEN = {"token": str, "logprob": float, "bytes": [int]}
TOKEN_LOGPROBS = [{**TOKEN, "top_logprobs": [TOKEN]}]
COLUMNS = {
    "text_offset": [int],
    "tokens": [str],
    "token_logprobs": [nullable(float)],
    "top_logprobs": [nullable(mapping(float))],
}
TOOL_CALL = {"id": str, "type": ("function",), "function": {"name arguments": str}}
CHAT_MESSAGE = {
    "role": ("assistant",),
    "content": nullable(str),
    "refusal": None,
    "annotations": NOTHING,
    "tool_calls?": described([TOOL_CALL], "the arguments of a call that was cut off may be no JSON"),
    "reasoning? reasoning_content?": described(str, "one of them, as the server is configured"),
}
CHAT_CHOICE = {
    **CHOICE,
    "finish_reason": described(("stop", "length", "tool_calls"), "tool_calls: run the calls, and send the results"),
    "message": CHAT_MESSAGE,
    "logprobs": nullable({"content": TOKEN_LOGPROBS, "refusal": None}),
}
ANSWER = {"id model": str, "created": described(int, "in seconds since 1970"), "usage": component("Usage")}

OPENAI: dict[str, Shape] = {
    "Error": {
        "error": described(
            {"message type code": str, "param": nullable(str)}, "code: the reason; param: the wrong field"
        )
    },
    "Usage": described(
        {
            "prompt_tokens completion_tokens total_tokens": int,
            "prompt_tokens_details?": {"cached_tokens": int},
            "completion_tokens_details?": {"reasoning_tokens": int},
        },
        "prompt_tokens_details is absent if the caller may not see what came from the cache",
    ),
    "Completion": {
        **ANSWER,
        "object": ("text_completion",),
        "choices": [{**CHOICE, "text": str, "logprobs": nullable(COLUMNS), **PROMPT_DETAILS}],
    },
    "ChatCompletion": {
        **ANSWER,
        "object": ("chat.completion",),
        "choices": [CHAT_CHOICE],
        **PROMPT_DETAILS,
    },
    "Model": described(
        {
            "id owned_by root display_name": str,
            "object type": ("model",),
            "created": int,
            "created_at": Schema(type="string", format="date-time"),
            "max_model_len": described(int, "most tokens of prompt and output together"),
            "task": ("generate", "embed", "score"),
            "parent": None,
        },
        "what OpenAI's, Anthropic's and vLLM's clients read; workers do not tell when a model was made",
    ),
    "ModelList": {
        "object": ("list",),
        "data": [component("Model")],
        "has_more": (False,),
        "first_id last_id": nullable(str),
    },
    "Tokens": {"count max_model_len": int, "tokens": [int], "token_strs?": [str]},
    "Text": {"prompt": str},
    "Status": {"status": str},
    "Version": {"version": str},
}

# Vectors and scores
POOLED_USAGE = {
    "prompt_tokens total_tokens": int,
    "completion_tokens": (0,),
    "prompt_tokens_details?": {"cached_tokens": int},
    "truncated_tokens?": described(int, "tokens that were cut off all inputs together"),
}
RANKED = {"index": int, "relevance_score": float}
POOLED_LIST = {"id model": str, "object": ("list",), "created": int, "usage": POOLED_USAGE}
VALUES = Schema(
    type=["array", "string"], items=schema_of(float), description="numbers, or with base64 their bytes as float32"
)
POOLING: dict[str, Shape] = {
    "Embeddings": {
        "object": ("list",),
        "model": str,
        "data": [{"object": ("embedding",), "index": int, "embedding": VALUES}],
        "usage": POOLED_USAGE,
    },
    "PooledValues": {**POOLED_LIST, "data": [{"index": int, "object": ("pooling",), "data": VALUES}]},
    "Scores": {**POOLED_LIST, "data": [{"index": int, "object": ("score",), "score": float}]},
    "Classes": {
        **POOLED_LIST,
        "data": [{"index num_classes": int, "label": nullable(str), "probs": [float]}],
    },
    "Reranking": {
        "id model": str,
        "usage": POOLED_USAGE,
        "results": [{**RANKED, "document?": {"text": str}}],
    },
    "CohereReranking": {
        "id": str,
        "results": [{**RANKED, "document?": {"text": str}}],
        "meta": {
            "api_version": {"version": str},
            "billed_units": {"search_units": int},
            "tokens": {"input_tokens output_tokens": int},
        },
    },
}

# /v1/responses
ITEM = {"id": str, "status": ("completed", "incomplete")}
OUTPUT_TEXT = {"type": ("output_text",), "text": str, "annotations": NOTHING, "logprobs": TOKEN_LOGPROBS}
OUTPUT_ITEM = one_of(
    {**ITEM, "type": ("message",), "role": ("assistant",), "content": [OUTPUT_TEXT]},
    {**ITEM, "type": ("reasoning",), "summary": NOTHING, "content": [{"type": ("reasoning_text",), "text": str}]},
    {**ITEM, "type": ("function_call",), "call_id name arguments": str},
    {**ITEM, "type": ("custom_tool_call",), "call_id name input": str},
)
RESPONSE_USAGE = {
    "input_tokens output_tokens total_tokens": int,
    "input_tokens_details": {"cached_tokens cache_write_tokens": int},
    "output_tokens_details": {"reasoning_tokens": int},
}
TEXT_FORMAT = {
    "type": ("text", "json_object", "json_schema"),
    "name? description?": str,
    "schema?": Schema(type="object"),
    "strict?": nullable(bool),
}
RESPONSES: dict[str, Shape] = {
    "Response": {
        "id model": str,
        "object": ("response",),
        "created_at top_logprobs": int,
        "completed_at max_output_tokens": nullable(int),
        "status": ("completed", "incomplete", "failed", "in_progress"),
        "incomplete_details": nullable({"reason": ("max_output_tokens",)}),
        "error": nullable({"code message": str}),
        "instructions previous_response_id safety_identifier prompt_cache_key user": nullable(str),
        "output": [OUTPUT_ITEM],
        "usage": nullable(RESPONSE_USAGE),
        "temperature top_p presence_penalty frequency_penalty": float,
        "text": {"format": TEXT_FORMAT},
        "reasoning": {"effort summary": nullable(str)},
        "tools": [
            {
                "type": ("function", "custom"),
                "name": str,
                "description": nullable(str),
                "parameters?": nullable(Schema(type="object")),
                "strict?": nullable(bool),
                "format?": {"type": ("text", "grammar"), "syntax? definition?": str},
            }
        ],
        "tool_choice": one_of(str, Schema(type="object")),
        "parallel_tool_calls store": bool,
        "max_tool_calls": None,
        "truncation": ("disabled",),
        "background": (False,),
        "service_tier": ("default",),
        "metadata": mapping(str),
    },
    "DeletedResponse": {"id": str, "object": ("response",), "deleted": (True,)},
}

# /v1/messages
MESSAGE_USAGE = {
    "input_tokens": described(int, "without those that came from the cache"),
    "cache_creation_input_tokens cache_read_input_tokens output_tokens": int,
    "output_tokens_details": described(
        nullable({"thinking_tokens": int}), "null if it is not known which tokens the model thought"
    ),
    "server_tool_use cache_creation inference_geo": None,
    "service_tier": ("standard",),
}
CONTENT_BLOCK = one_of(
    {"type": ("text",), "text": str, "citations": NOTHING},
    {"type": ("thinking",), "thinking signature": str},
    {"type": ("tool_use",), "id name": str, "input": Schema(type="object")},
)
MESSAGES: dict[str, Shape] = {
    "MessagesError": {
        "type": ("error",),
        "error": {"type message": str, "details?": {"error_code": str}},
        "request_id": nullable(str),
    },
    "MessageAnswer": {
        "id model": str,
        "type": ("message",),
        "role": ("assistant",),
        "content": Schema(schema_of([CONTENT_BLOCK]), minItems=1),
        "stop_reason": ("end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"),
        "stop_sequence": nullable(str),
        "stop_details container": None,
        "usage": MESSAGE_USAGE,
    },
    "TokenCount": {"input_tokens": int},
}

# /fleet: the messages of FleetService, as live/fleet_json.py writes them.
_CPP = FieldDescriptor
_KINDS: dict[int, Shape] = {
    _CPP.CPPTYPE_STRING: str,
    _CPP.CPPTYPE_BOOL: bool,
    _CPP.CPPTYPE_DOUBLE: nullable(float),  # null: not a number that JSON has
    _CPP.CPPTYPE_UINT32: int,
    _CPP.CPPTYPE_UINT64: int,
}


def _fields(message: Descriptor) -> dict[str, Shape]:
    return {field.name: _field(field) for field in message.fields}


def _field(field: FieldDescriptor) -> Shape:
    value: Shape
    if field.message_type is not None:
        value = component(field.message_type.name)
    elif field.enum_type is not None:
        value = (*words_of(field.enum_type).values(), "unknown")
    else:
        value = _KINDS[field.cpp_type]
    if field.is_repeated:
        return [value]
    return nullable(value) if field.has_presence else value


def _messages(*answers: Descriptor) -> dict[str, Shape]:
    """The shape of each message that the answers have, by its name."""
    found: dict[str, Shape] = {}
    waiting = list(answers)
    while waiting:
        message = waiting.pop()
        if message.name not in found:
            found[message.name] = _fields(message)
            waiting += [field.message_type for field in message.fields if field.message_type is not None]
    return found


FLEET: dict[str, Shape] = {
    **_messages(
        WatchFleetResponse.DESCRIPTOR,
        GetRequestResponse.DESCRIPTOR,
        DrainWorkerResponse.DESCRIPTOR,
        UndrainWorkerResponse.DESCRIPTOR,
    ),
    # A timeline has the fields of its summary beside its own.
    "RequestStory": {**_fields(RequestSummary.DESCRIPTOR), **_fields(GetRequestResponse.DESCRIPTOR)},
    "RequestList": _fields(ListRequestsResponse.DESCRIPTOR),
}
del FLEET["RequestStory"]["summary"]

SCHEMAS = {name: schema_of(shape) for name, shape in {**OPENAI, **POOLING, **RESPONSES, **MESSAGES, **FLEET}.items()}

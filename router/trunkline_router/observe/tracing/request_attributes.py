"""The attributes of a request's own span, and of a call that was refused before it became a request: OpenTelemetry's
conventions for generative AI, RPC and HTTP, and ours.

https://opentelemetry.io/docs/specs/semconv/rpc/grpc/ and https://opentelemetry.io/docs/specs/semconv/http/http-spans/,
version 1.44.0. The version after it calls `rpc.response.status_code` `rpc.status_code`.
"""

from collections.abc import Sequence

import grpc
from opentelemetry.trace import Status, StatusCode

from trunkline.status import CODE_DEADLINE_EXCEEDED, CODE_INTERNAL, CODE_UNAVAILABLE
from trunkline.v1.generation_pb2 import SamplingParams
from trunkline_router.observe.tracing.trace_builder import UNSET, Attributes
from trunkline_router.record.error_statuses import TABLE
from trunkline_router.record.refused_calls import KNOWN_METHODS, RefusedCall
from trunkline_router.record.request_record import (
    CANCELLED,
    GRPC,
    PROVIDER,
    UNKNOWN,
    RequestRecord,
    operation_of,
)
from trunkline_router.record.ttft_parts import causes_of
from trunkline_runtime.telemetry import genai

POST = "POST"  # the method of all requests over HTTP
# Of RFC 9110, and PATCH: the methods that the conventions know. Any other one is _OTHER, and HTTP in names of spans.
OTHER_METHOD, UNNAMED_METHOD = "_OTHER", "HTTP"
HTTP_OK, HTTP_SERVER_ERROR = 200, 500

STATUS_NAMES: dict[int, str] = {code.value[0]: code.name for code in grpc.StatusCode}
_UNKNOWN, _UNIMPLEMENTED, _DATA_LOSS = 2, 12, 15
# Codes that are errors of a server, by the conventions of gRPC. Others are its client's.
SERVER_ERRORS = {CODE_DEADLINE_EXCEEDED, CODE_INTERNAL, CODE_UNAVAILABLE, _UNKNOWN, _UNIMPLEMENTED, _DATA_LOSS}

# Sampling parameters that the conventions name
_PARAMETERS = {
    "temperature": genai.REQUEST_TEMPERATURE,
    "top_p": genai.REQUEST_TOP_P,
    "top_k": genai.REQUEST_TOP_K,
    "frequency_penalty": genai.REQUEST_FREQUENCY_PENALTY,
    "presence_penalty": genai.REQUEST_PRESENCE_PENALTY,
}


def span_name(protocol: str, method: str, route: str) -> str:
    """The name of a request's own span, which is a server's: over HTTP `{method} {route}`, over gRPC the method's full
    name. The names in the conventions for generative AI are for spans of clients."""
    return route if protocol == GRPC else f"{method if method in KNOWN_METHODS else UNNAMED_METHOD} {route}".strip()


def request_attributes(record: RequestRecord, sampling: SamplingParams | None, kept: Sequence[str]) -> Attributes:
    """Returns all attributes of a request's own span.

    sampling: the request's parameters, which its record has dropped
    kept: why the request is exported
    """
    return {
        **_own(record, kept),
        **genai.spelled(_generative(record)),
        **_of_protocol(record),
        **_of_sampling(record, sampling),
        **_latencies(record),
    }


def status(record: RequestRecord) -> Status:
    """An error, if the server is to blame. Over gRPC it has a description, because several reasons share a code."""
    if not record.is_failed:
        return UNSET
    if record.protocol == GRPC:
        return Status(StatusCode.ERROR, record.outcome) if record.code in SERVER_ERRORS else UNSET
    return Status(StatusCode.ERROR) if _http_error(record.outcome) >= HTTP_SERVER_ERROR else UNSET


def _own(record: RequestRecord, kept: Sequence[str]) -> Attributes:
    """Ours."""
    ended_s = record.started_s if record.ended_s is None else record.ended_s
    cause, queue_cause = causes_of(record, ended_s)
    device_times = [attempt.device_s for attempt in record.attempts if attempt.timelines]
    has_choices = bool(record.choices)
    return {
        "trunkline.request_id": record.request_id,
        "trunkline.outcome": record.outcome,
        "trunkline.kept": kept,
        "trunkline.tenant": record.tenant or None,
        "trunkline.lane": record.lane or None,
        "trunkline.model": record.model or None,
        "trunkline.worker": record.worker or None,
        "trunkline.grants": record.grants or None,
        "trunkline.resumptions": record.resumptions or None,
        "trunkline.choices": record.choices or None,
        "trunkline.inputs": record.inputs or None,
        "trunkline.cause": cause or None,
        "trunkline.queue_cause": queue_cause or None,
        "trunkline.prompt_tokens": record.prompt_tokens if has_choices else None,
        "trunkline.cached_tokens": record.cached_tokens if has_choices else None,
        "trunkline.cache_miss": record.cache_miss or None,
        "trunkline.seen_tokens": record.seen_tokens if record.cache_miss else None,
        "trunkline.completion_tokens": record.completion_tokens if has_choices else None,
        "trunkline.grammar": record.grammar or None,
        "trunkline.tool_calls": record.tool_calls or None,
        "trunkline.complete_tool_calls": record.complete_tool_calls if record.tool_calls else None,
        "trunkline.stalled_s": record.stalled_s if record.attempts else None,
        "trunkline.device_s": sum(device_times)
        if device_times
        else None,  # workers that said nothing may have computed, too
        "trunkline.cost": record.cost,
    }


def _generative(record: RequestRecord) -> Attributes:
    return {
        genai.OPERATION_NAME: operation_of(record),
        genai.PROVIDER_NAME: PROVIDER,
        genai.REQUEST_STREAM: record.is_streamed,
        genai.RESPONSE_ID: record.request_id,
        genai.REQUEST_MODEL: record.model or None,
        genai.RESPONSE_MODEL: record.model or None,
        genai.REQUEST_CHOICE_COUNT: record.choices if record.choices > 1 else None,
        genai.RESPONSE_FINISH_REASONS: record.outcome.split(",") if record.has_answer else None,
        genai.REQUEST_MAX_TOKENS: record.max_tokens,
        genai.RESPONSE_TIME_TO_FIRST_CHUNK: record.ttft_s,
        genai.USAGE_INPUT_TOKENS: record.prompt_tokens if record.choices else None,
        genai.USAGE_OUTPUT_TOKENS: record.completion_tokens if record.choices else None,
        genai.USAGE_REASONING_OUTPUT_TOKENS: record.reasoning_tokens or None,
        genai.USAGE_CACHE_READ_INPUT_TOKENS: record.cached_tokens if record.choices else None,
    }


def _of_sampling(record: RequestRecord, sampling: SamplingParams | None) -> Attributes:
    """The parameters that the conventions name, as far as they are set. They hold nothing that a client has written."""
    if sampling is None:
        return {}
    parameters = {name: value for field, value in sampling.ListFields() if (name := _PARAMETERS.get(field.name))}
    return {**parameters, genai.REQUEST_SEED: sampling.seed if record.is_seeded else None}


def _of_protocol(record: RequestRecord) -> Attributes:
    is_cancelled = record.outcome == CANCELLED
    if record.protocol == GRPC:
        code = "CANCELLED" if is_cancelled else STATUS_NAMES.get(record.code, UNKNOWN)
        return _of_rpc(record.endpoint, code, code if record.is_failed else None)
    is_begun = record.is_streamed and record.first_token_s is not None
    status = None if is_cancelled else HTTP_OK
    if record.is_failed and not is_begun:
        status = _http_error(record.outcome)
    return _of_http(POST, record.endpoint, record.url_scheme, status, record.outcome if record.is_failed else None)


def _of_rpc(method: str, code: str, error: str | None) -> Attributes:
    return {
        "rpc.system.name": "grpc",
        "rpc.method": method,
        "rpc.response.status_code": code,
        "error.type": error,
    }


def _of_http(method: str, route: str, url_scheme: str, status: int | None, error: str | None) -> Attributes:
    """Without a route the path is anything that a client has written, so it is not told."""
    return {
        "http.request.method": method,
        "http.route": route or None,
        "http.response.status_code": status,
        "url.path": route or None,
        "url.scheme": url_scheme,
        "error.type": error,
    }


def _http_error(outcome: str) -> int:
    row = TABLE.get(outcome)
    return HTTP_SERVER_ERROR if row is None else row.status


def _latencies(record: RequestRecord) -> Attributes:
    """vLLM's attributes, in seconds: of the last worker's first choice."""
    if not genai.adds_latencies() or record.duration_s is None:
        return {}
    attributes = {genai.LATENCY_E2E: record.duration_s, genai.LATENCY_TIME_TO_FIRST_TOKEN: record.ttft_s}
    timeline = record.last_timeline
    if timeline is not None and timeline.HasField("admitted_s"):
        attributes[genai.LATENCY_TIME_IN_QUEUE] = timeline.admitted_s
        attributes[genai.LATENCY_TIME_IN_MODEL_INFERENCE] = timeline.ended_s - timeline.admitted_s
        if timeline.HasField("first_token_s"):
            attributes[genai.LATENCY_TIME_IN_MODEL_PREFILL] = timeline.first_token_s - timeline.admitted_s
            attributes[genai.LATENCY_TIME_IN_MODEL_DECODE] = timeline.ended_s - timeline.first_token_s
    return attributes


def refused_attributes(call: RefusedCall, kept: str) -> Attributes:
    """All attributes of the span of a call that was refused before it became a request.  kept: why it is exported"""
    own = {
        "trunkline.outcome": call.reason,
        "trunkline.kept": [kept],
        "trunkline.request_id": call.request_id or None,
        "trunkline.tenant": call.tenant or None,
    }
    if call.protocol == GRPC:
        code = STATUS_NAMES.get(call.status, call.reason)
        return {**own, **_of_rpc(call.route, code, code)}
    method = call.method if call.method in KNOWN_METHODS else OTHER_METHOD
    return {**own, **_of_http(method, call.route, call.url_scheme, call.status, call.reason)}


def is_servers_fault(call: RefusedCall) -> bool:
    """Whether the call failed through no fault of its client."""
    return call.status in SERVER_ERRORS if call.protocol == GRPC else call.status >= HTTP_SERVER_ERROR

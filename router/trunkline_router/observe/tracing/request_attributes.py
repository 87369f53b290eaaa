"""The attributes of a request's own span: OpenTelemetry's conventions for generative AI, RPC and HTTP, and ours.

https://opentelemetry.io/docs/specs/semconv/rpc/grpc/ and https://opentelemetry.io/docs/specs/semconv/http/http-spans/,
version 1.44.0. The version after it calls `rpc.response.status_code` `rpc.status_code`.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import grpc
from opentelemetry.trace import StatusCode
from opentelemetry.util.types import AttributeValue

from trunkline.status import CODE_DEADLINE_EXCEEDED, CODE_INTERNAL, CODE_UNAVAILABLE
from trunkline.v1.generation_pb2 import SamplingParams
from trunkline_router.record.error_statuses import TABLE
from trunkline_router.record.request_record import (
    CANCELLED,
    GRPC,
    PROVIDER,
    UNKNOWN,
    RequestRecord,
    has_answer,
    is_failure,
    operation_of,
)
from trunkline_router.record.ttft_parts import causes_of
from trunkline_runtime.telemetry import genai
from trunkline_runtime.telemetry.otlp_spans import UNSET, span_attributes, unique_attribute
from trunkline_runtime.telemetry.otlp_spans import status as otlp_status

Attributes = dict[str, AttributeValue]

RPC_SYSTEM, RPC_METHOD, RPC_STATUS = "rpc.system.name", "rpc.method", "rpc.response.status_code"
HTTP_METHOD, HTTP_ROUTE, HTTP_STATUS = "http.request.method", "http.route", "http.response.status_code"
URL_PATH, URL_SCHEME, ERROR_TYPE = "url.path", "url.scheme", "error.type"
POST = "POST"  # the method of all requests over HTTP
HTTP_OK, HTTP_SERVER_ERROR = 200, 500

MOST_WRITTEN = 1024  # attributes that many requests share

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


def span_name(protocol: str, endpoint: str) -> str:
    """The name of a request's own span, which is a server's: over HTTP `{method} {route}`, over gRPC the method's full
    name. The names in the conventions for generative AI are for spans of clients."""
    return endpoint if protocol == GRPC else f"{POST} {endpoint}"


class _Repeated(NamedTuple):
    """What is the same in many requests: the attributes that tell it are written once."""

    protocol: str
    endpoint: str
    url_scheme: str
    outcome: str
    code: int
    is_streamed: bool
    is_begun: bool  # whether the client got a first token
    tenant: str
    lane: str
    model: str
    worker: str
    grants: int
    resumptions: int
    choices: int
    cause: str
    queue_cause: str
    kept: tuple[str, ...]


def request_attributes(record: RequestRecord, sampling: SamplingParams | None, kept: Sequence[str]) -> bytes:
    """Returns all attributes of a request's own span, as bytes of the span.

    sampling: the request's parameters, which its record has dropped
    kept: why the request is exported
    """
    repeated = _Repeated(
        record.protocol,
        record.endpoint,
        record.url_scheme,
        record.outcome,
        record.code,
        record.is_streamed,
        record.first_token_s is not None,
        record.tenant,
        record.lane,
        record.model,
        record.worker,
        record.grants,
        record.resumptions,
        record.choices,
        *causes_of(record, record.started_s if record.ended_s is None else record.ended_s),
        tuple(kept),
    )
    own = {**_own(record), **_of_sampling(record, sampling), **_latencies(record)}
    return b"".join(
        (
            _written(repeated),
            unique_attribute("trunkline.request_id", record.request_id),
            unique_attribute(genai.RESPONSE_ID, record.request_id),
            span_attributes(own),
        )
    )


@lru_cache(MOST_WRITTEN)
def _written(of: _Repeated) -> bytes:
    return span_attributes({**_told(of), **genai.spelled(_generative(of)), **_protocol(of)})


def status(record: RequestRecord) -> bytes:
    """An error, if the server is to blame. Over gRPC it has a description, because several reasons share a code."""
    if not record.is_failed:
        return UNSET
    if record.protocol == GRPC:
        return otlp_status(StatusCode.ERROR, record.outcome) if record.code in SERVER_ERRORS else UNSET
    return otlp_status(StatusCode.ERROR) if _http_error(record.outcome) >= HTTP_SERVER_ERROR else UNSET


def _told(of: _Repeated) -> Attributes:
    """Ours."""
    attributes: Attributes = {"trunkline.outcome": of.outcome, "trunkline.kept": of.kept}
    for name in ("tenant", "lane", "model", "worker", "grants", "resumptions", "choices", "cause", "queue_cause"):
        if value := getattr(of, name):
            attributes["trunkline." + name] = value
    return attributes


def _generative(of: _Repeated) -> Attributes:
    attributes: Attributes = {
        genai.OPERATION_NAME: operation_of(of.endpoint),
        genai.PROVIDER_NAME: PROVIDER,
        genai.REQUEST_STREAM: of.is_streamed,
    }
    if of.model:
        attributes[genai.REQUEST_MODEL] = attributes[genai.RESPONSE_MODEL] = of.model
    if of.choices > 1:
        attributes[genai.REQUEST_CHOICE_COUNT] = of.choices
    if has_answer(of.outcome):
        attributes[genai.RESPONSE_FINISH_REASONS] = of.outcome.split(",")
    return attributes


def _own(record: RequestRecord) -> Attributes:
    """What is different in each request."""
    attributes: Attributes = {}
    if record.choices:
        attributes["trunkline.prompt_tokens"] = record.prompt_tokens
        attributes["trunkline.cached_tokens"] = record.cached_tokens
        attributes["trunkline.completion_tokens"] = record.completion_tokens
        usage: Attributes = {
            genai.USAGE_INPUT_TOKENS: record.prompt_tokens,
            genai.USAGE_OUTPUT_TOKENS: record.completion_tokens,
            genai.USAGE_CACHE_READ_INPUT_TOKENS: record.cached_tokens,
        }
        attributes |= genai.spelled(usage)
    if record.max_tokens is not None:
        attributes[genai.REQUEST_MAX_TOKENS] = record.max_tokens
    if record.ttft_s is not None:
        attributes[genai.RESPONSE_TIME_TO_FIRST_CHUNK] = record.ttft_s
    if record.attempts:
        attributes["trunkline.stalled_s"] = record.stalled_s
    told = [attempt.device_s for attempt in record.attempts if attempt.timelines]
    if told:  # workers that said nothing may have computed, too
        attributes["trunkline.device_s"] = sum(told)
    cost = record.cost
    if cost is not None:
        attributes["trunkline.cost"] = cost
    return attributes


def _of_sampling(record: RequestRecord, sampling: SamplingParams | None) -> Attributes:
    """The parameters that the conventions name, as far as they are set. They hold nothing that a client has written."""
    if sampling is None:
        return {}
    attributes: Attributes = {genai.REQUEST_SEED: sampling.seed} if record.is_seeded else {}
    for parameter, value in sampling.ListFields():
        attribute = _PARAMETERS.get(parameter.name)
        if attribute is not None:
            attributes[attribute] = value
    return attributes


def _protocol(of: _Repeated) -> Attributes:
    attributes: Attributes
    if of.protocol == GRPC:
        code = "CANCELLED" if of.outcome == CANCELLED else STATUS_NAMES.get(of.code, UNKNOWN)
        attributes = {RPC_SYSTEM: "grpc", RPC_METHOD: of.endpoint, RPC_STATUS: code}
        if is_failure(of.outcome):
            attributes[ERROR_TYPE] = code
        return attributes
    attributes = {HTTP_METHOD: POST, HTTP_ROUTE: of.endpoint, URL_PATH: of.endpoint, URL_SCHEME: of.url_scheme}
    if is_failure(of.outcome):
        attributes[ERROR_TYPE] = of.outcome
        attributes[HTTP_STATUS] = HTTP_OK if of.is_streamed and of.is_begun else _http_error(of.outcome)
    elif of.outcome != CANCELLED:
        attributes[HTTP_STATUS] = HTTP_OK
    return attributes


def _http_error(outcome: str) -> int:
    row = TABLE.get(outcome)
    return HTTP_SERVER_ERROR if row is None else row.status


def _latencies(record: RequestRecord) -> Attributes:
    """vLLM's attributes, in seconds: of the last worker's first choice."""
    if not genai.adds_latencies() or record.duration_s is None:
        return {}
    attributes: Attributes = {genai.LATENCY_E2E: record.duration_s}
    if record.ttft_s is not None:
        attributes[genai.LATENCY_TIME_TO_FIRST_TOKEN] = record.ttft_s
    timeline = record.last_timeline
    if timeline is not None and timeline.HasField("admitted_s"):
        attributes[genai.LATENCY_TIME_IN_QUEUE] = timeline.admitted_s
        attributes[genai.LATENCY_TIME_IN_MODEL_INFERENCE] = timeline.ended_s - timeline.admitted_s
        if timeline.HasField("first_token_s"):
            attributes[genai.LATENCY_TIME_IN_MODEL_PREFILL] = timeline.first_token_s - timeline.admitted_s
            attributes[genai.LATENCY_TIME_IN_MODEL_DECODE] = timeline.ended_s - timeline.first_token_s
    return attributes

"""Names of OpenTelemetry's semantic conventions for generative AI, release 0.1.0, and of vLLM's attributes.

https://github.com/open-telemetry/semantic-conventions-genai; up to version 1.41.0 they were among the core conventions.
They are in development. OTEL_SEMCONV_STABILITY_OPT_IN with `gen_ai/dup` in its list adds the spellings of
core versions before 1.37 to every span, as `database/dup` and `http/dup` do for theirs. This value is our own.
"""

import os
from collections.abc import Mapping
from functools import cache
from typing import TypeVar

VERSION = "0.1.0"

Value = TypeVar("Value")

OPERATION_NAME = "gen_ai.operation.name"
PROVIDER_NAME = "gen_ai.provider.name"
REQUEST_CHOICE_COUNT = "gen_ai.request.choice.count"
REQUEST_FREQUENCY_PENALTY = "gen_ai.request.frequency_penalty"
REQUEST_MAX_TOKENS = "gen_ai.request.max_tokens"
REQUEST_MODEL = "gen_ai.request.model"
REQUEST_PRESENCE_PENALTY = "gen_ai.request.presence_penalty"
REQUEST_SEED = "gen_ai.request.seed"
REQUEST_STREAM = "gen_ai.request.stream"
REQUEST_TEMPERATURE = "gen_ai.request.temperature"
REQUEST_TOP_K = "gen_ai.request.top_k"
REQUEST_TOP_P = "gen_ai.request.top_p"
RESPONSE_FINISH_REASONS = "gen_ai.response.finish_reasons"
RESPONSE_ID = "gen_ai.response.id"
RESPONSE_MODEL = "gen_ai.response.model"
RESPONSE_TIME_TO_FIRST_CHUNK = "gen_ai.response.time_to_first_chunk"
USAGE_CACHE_READ_INPUT_TOKENS = "gen_ai.usage.cache_read.input_tokens"
USAGE_INPUT_TOKENS = "gen_ai.usage.input_tokens"
USAGE_OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
USAGE_REASONING_OUTPUT_TOKENS = "gen_ai.usage.reasoning.output_tokens"

# Metrics of servers, and their buckets in seconds.
SERVER_REQUEST_DURATION = "gen_ai.server.request.duration"
SERVER_TIME_PER_OUTPUT_TOKEN = "gen_ai.server.time_per_output_token"
SERVER_TIME_TO_FIRST_TOKEN = "gen_ai.server.time_to_first_token"
DURATION_BUCKETS = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
PER_TOKEN_BUCKETS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
FIRST_TOKEN_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
)  # fmt: skip

# vLLM's, of vllm/tracing/utils.py in version 0.32: seconds.
LATENCY_TIME_IN_QUEUE = "gen_ai.latency.time_in_queue"
LATENCY_TIME_TO_FIRST_TOKEN = "gen_ai.latency.time_to_first_token"
LATENCY_E2E = "gen_ai.latency.e2e"
LATENCY_TIME_IN_MODEL_PREFILL = "gen_ai.latency.time_in_model_prefill"
LATENCY_TIME_IN_MODEL_DECODE = "gen_ai.latency.time_in_model_decode"
LATENCY_TIME_IN_MODEL_INFERENCE = "gen_ai.latency.time_in_model_inference"

OPT_IN = "OTEL_SEMCONV_STABILITY_OPT_IN"
BOTH, VLLM = "gen_ai/dup", "gen_ai/vllm"
OLD_SPELLINGS = {
    PROVIDER_NAME: "gen_ai.system",
    USAGE_INPUT_TOKENS: "gen_ai.usage.prompt_tokens",
    USAGE_OUTPUT_TOKENS: "gen_ai.usage.completion_tokens",
}


def spelled(attributes: Mapping[str, Value]) -> Mapping[str, Value]:
    """Attributes under the names that OTEL_SEMCONV_STABILITY_OPT_IN asks for."""
    if BOTH not in _opted_in():
        return attributes
    old = {OLD_SPELLINGS[name]: value for name, value in attributes.items() if name in OLD_SPELLINGS}
    return {**attributes, **old}


@cache
def _opted_in() -> frozenset[str]:
    return frozenset(part.strip() for part in os.environ.get(OPT_IN, "").split(","))


def adds_latencies() -> bool:
    """Whether spans also have vLLM's attributes: with `gen_ai/vllm` in the list, which is Trunkline's own addition."""
    return VLLM in _opted_in()

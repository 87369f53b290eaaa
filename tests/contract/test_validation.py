"""Validation of requests, and the refusals of invalid ones."""

import math
import re

import pytest

from trunkline.status import CODE_INVALID_ARGUMENT, RequestRefused
from trunkline.v1.generation_pb2 import RequestError, SamplingParams
from trunkline.v1.worker_pb2 import OutputKind, PoolingModel
from trunkline.validation import (
    check_dimensions,
    check_length,
    check_prompt_logprobs,
    validate_sampling,
    validate_token_ids,
)

BAD = [
    ({"temperature": -0.1}, "sampling.temperature"),
    ({"top_p": 0.0}, "sampling.top_p"),
    ({"top_p": 1.1}, "sampling.top_p"),
    ({"min_p": -0.1}, "sampling.min_p"),
    ({"repetition_penalty": 0.0}, "sampling.repetition_penalty"),
    ({"repetition_penalty": 1e-36}, "sampling.repetition_penalty"),
    ({"repetition_penalty": 0.0099}, "sampling.repetition_penalty"),
    ({"presence_penalty": 2.5}, "sampling.presence_penalty"),
    ({"frequency_penalty": -2.5}, "sampling.frequency_penalty"),
    ({"max_tokens": 0}, "sampling.max_tokens"),
    ({"max_tokens": 2, "min_tokens": 3}, "sampling.min_tokens"),
    ({"logprobs": 21}, "sampling.logprobs"),
    ({"prompt_logprobs": 1000}, "sampling.prompt_logprobs"),
    ({"stop": [""]}, "sampling.stop"),
    ({"stop": ["x" * 1025]}, "sampling.stop"),
    ({"stop": ["x"] * 17}, "sampling.stop"),
    ({"stop_token_ids": [100]}, "sampling.stop_token_ids"),
    ({"stop_token_ids": [-1]}, "sampling.stop_token_ids"),
    ({"stop_token_ids": [1] * 129}, "sampling.stop_token_ids"),
    ({"logit_bias": {100: 1.0}}, "sampling.logit_bias"),
    ({"logit_bias": {1: math.nan}}, "sampling.logit_bias"),
    ({"logit_bias": {1: 101.0}}, "sampling.logit_bias"),
]


@pytest.mark.parametrize(("fields", "named"), BAD, ids=[str(fields)[:40] for fields, _ in BAD])
def test_a_field_out_of_range_is_refused_by_name(fields: dict[str, object], named: str) -> None:
    with pytest.raises(RequestRefused) as caught:
        validate_sampling(SamplingParams(**fields), vocab_size=100)  # type: ignore[arg-type]
    refused = caught.value
    assert (refused.code, refused.reason, refused.field) == (CODE_INVALID_ARGUMENT, "INVALID_REQUEST", named)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": 100.5, "logprobs": 21}, "sampling.temperature: 100.5 is not in [0, 100]"),
        ({"top_p": 0.0}, "sampling.top_p: 0 is not in (0, 1]"),
        ({"repetition_penalty": 0.0}, "sampling.repetition_penalty: 0 is not in [0.01, 10]"),
        ({"logprobs": 21, "prompt_logprobs": 22}, "sampling.logprobs: 21 is more than 20"),
    ],
)
def test_a_refusal_names_the_first_wrong_field_and_its_range(fields: dict[str, object], message: str) -> None:
    with pytest.raises(RequestRefused) as caught:
        validate_sampling(SamplingParams(**fields), vocab_size=100)  # type: ignore[arg-type]
    assert caught.value.message == message


def test_limits_themselves_are_allowed() -> None:
    edge = SamplingParams(
        temperature=0, top_p=1, min_p=1, repetition_penalty=10, presence_penalty=-2, max_tokens=1, min_tokens=1,
        logprobs=20, stop=["x" * 1024] * 16, stop_token_ids=[0, 99], logit_bias={0: -100.0, 99: 100.0},
    )  # fmt: skip
    validate_sampling(edge, vocab_size=100)
    validate_sampling(SamplingParams(), vocab_size=100)


def test_the_least_penalty_is_the_one_that_a_float_field_carries() -> None:
    validate_sampling(SamplingParams(repetition_penalty=0.01), vocab_size=100)


def test_min_tokens_must_leave_a_token_that_does_not_end_the_output() -> None:
    all_but_one = SamplingParams(min_tokens=1, stop_token_ids=range(99))
    validate_sampling(all_but_one, vocab_size=100)
    all_but_one.ignore_eos = True
    validate_sampling(all_but_one, vocab_size=100, eos_token_ids=[99])
    all_but_one.ignore_eos = False
    with pytest.raises(RequestRefused) as caught:
        validate_sampling(all_but_one, vocab_size=100, eos_token_ids=[99])
    assert caught.value.field == "sampling.min_tokens"


def test_the_first_bad_token_is_named_with_its_place() -> None:
    with pytest.raises(RequestRefused, match=r"token id -5 at index 2 is not in \[0, 100\)"):
        validate_token_ids([1, 2, -5, 100], vocab_size=100, field="token_ids")


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "fits"), [(9, 1, True), (9, 2, False), (10, None, False), (9, None, True), (8, 2, True)]
)
def test_length_counts_prompt_and_output_together(prompt: int, max_tokens: int | None, fits: bool) -> None:
    if fits:
        check_length(prompt, max_tokens, context_length=10, capacity=64)
        return
    with pytest.raises(RequestRefused) as caught:
        check_length(prompt, max_tokens, context_length=10, capacity=64)
    assert caught.value.reason == "CONTEXT_LENGTH_EXCEEDED"
    assert "this model's maximum context length is 10 tokens" in caught.value.message, "clients look for these words"
    with pytest.raises(RequestRefused, match="KV pool"):
        check_length(prompt, max_tokens, context_length=64, capacity=10)


def test_a_prompt_that_is_too_long_is_refused_in_words_that_assistants_read_numbers_in() -> None:
    """In Claude Code 2.1.332 and Qwen Code 0.24.4."""
    with pytest.raises(RequestRefused) as caught:
        check_length(40, None, context_length=32, capacity=64)
    claude_code = re.search(r"prompt is too long[^0-9]*(\d+)\s*tokens?\s*>\s*(\d+)", caught.value.message)
    assert claude_code is not None
    assert claude_code.groups() == ("40", "31")


@pytest.mark.parametrize("output", [OutputKind.OUTPUT_KIND_VECTOR, OutputKind.OUTPUT_KIND_SCORE])
def test_an_output_that_is_no_tokens_has_none(output: "OutputKind.ValueType") -> None:
    validate_sampling(SamplingParams(max_tokens=0), vocab_size=100, output=output)
    for params in (SamplingParams(), SamplingParams(max_tokens=1)):
        with pytest.raises(RequestRefused, match="must be 0: the output is a") as caught:
            validate_sampling(params, vocab_size=100, output=output)
        assert caught.value.field == "sampling.max_tokens"
    for tokens in (OutputKind.OUTPUT_KIND_UNSPECIFIED, OutputKind.OUTPUT_KIND_TOKENS):
        with pytest.raises(RequestRefused, match="must be at least 1"):
            validate_sampling(SamplingParams(max_tokens=0), vocab_size=100, output=tokens)


def test_a_prompt_without_output_tokens_may_fill_the_context() -> None:
    check_length(10, 0, context_length=10, capacity=64)
    with pytest.raises(RequestRefused, match="too long: 11 tokens > 10 maximum"):
        check_length(11, 0, context_length=10, capacity=64)


def test_dimensions_that_a_model_does_not_offer_are_refused_with_those_that_it_does() -> None:
    check_dimensions(0, whole := PoolingModel(dimensions=8))
    check_dimensions(8, whole)
    with pytest.raises(RequestRefused, match="has 8 alone"):
        check_dimensions(4, whole)
    check_dimensions(2, some := PoolingModel(dimensions=8, offered_dimensions=[2, 4]))
    with pytest.raises(RequestRefused, match="has 2, 4 and 8"):
        check_dimensions(3, some)
    check_dimensions(1, every := PoolingModel(dimensions=8, any_dimensions=True))
    with pytest.raises(RequestRefused, match="has 1 to 8"):
        check_dimensions(9, every)
    with pytest.raises(RequestRefused, match="only a vector has dimensions"):
        check_dimensions(5, PoolingModel(labels=["relevance"]))


def test_a_refusal_survives_the_wire() -> None:
    refused = RequestRefused(8, "OVERLOADED", "full", field="x", retry_delay_ms=5)
    again = RequestRefused.from_proto(RequestError.FromString(refused.to_proto().SerializeToString()))
    assert vars(again) == vars(refused)


def test_prompt_logprobs_that_fill_a_message_are_refused() -> None:
    params = SamplingParams(prompt_logprobs=20)
    check_prompt_logprobs(params, 49_000)
    with pytest.raises(RequestRefused, match="at most 7 for a prompt of 131072 tokens") as caught:
        check_prompt_logprobs(params, 131_072)
    assert caught.value.field == "sampling.prompt_logprobs"

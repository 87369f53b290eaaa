"""Fields that OpenAI's endpoints have in common, and vLLM's for what OpenAI does not have."""

from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any, ClassVar

from pydantic import Field

from trunkline.sampling_params import Http
from trunkline.status import invalid
from trunkline.v1.generation_pb2 import SamplingParams
from trunkline_router.edge.output_format import StructuredOutputs
from trunkline_router.edge.request_fields import (
    MOST_UINT32,
    NOT_YET,
    Constraint,
    Count,
    Fields,
    SamplingFields,
    Strings,
    with_parameters,
)

REMOVED = "was removed from vLLM: use structured_outputs"


class StreamOptions(Fields):
    """What a stream carries beside the output."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # usage in every event
    ignored: ClassVar[frozenset[str]] = frozenset({"include_obfuscation"})


@with_parameters(Http.OPENAI)
class ChoiceFields(SamplingFields):
    """What OpenAI names in all its endpoints."""

    n: Annotated[int, Field(ge=1, le=MOST_UINT32)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: str | Strings | None = None


class GenerationFields(ChoiceFields):
    """What OpenAI's endpoints have in common."""

    # As vLLM names them.
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    prompt_logprobs: Count | None = None
    return_token_ids: bool | None = None
    structured_outputs: StructuredOutputs | None = None

    ignored: ClassVar[frozenset[str]] = frozenset(
        {"user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "service_tier"}
    )
    unserved: ClassVar[Mapping[str, str]] = {
        "best_of": NOT_YET,
        "use_beam_search": NOT_YET,
        "length_penalty": NOT_YET,
        "early_stopping": NOT_YET,
        "guided_json": REMOVED,
        "guided_regex": REMOVED,
        "guided_choice": REMOVED,
        "guided_grammar": REMOVED,
        "guided_decoding_backend": REMOVED,
        "guided_whitespace_pattern": REMOVED,
        "logits_processors": NOT_YET,
        "truncate_prompt_tokens": NOT_YET,
        "bad_words": NOT_YET,
        "allowed_token_ids": NOT_YET,
        "kv_transfer_params": NOT_YET,
        "vllm_xargs": NOT_YET,
        "lora_request": NOT_YET,
    }
    defaults: ClassVar[Mapping[str, Any]] = {"best_of": 1, "length_penalty": 1.0, "suffix": ""}

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with an event that has the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def has_continuous_usage(self) -> bool:
        """Whether each event of a stream has the usage so far."""
        options = self.stream_options
        return bool(options and options.include_usage and options.continuous_usage_stats)

    @property
    def format(self) -> Constraint | None:
        """What the endpoint's own field for the form of the text asks for. Raises RequestRefused (INVALID_REQUEST)."""
        return None

    @cached_property
    def constraint(self) -> Constraint | None:
        constraint = self.format
        if self.structured_outputs is None:
            return constraint
        if constraint is not None:
            raise invalid("structured_outputs", f"contradicts {constraint.field}")
        return self.structured_outputs.constraint("structured_outputs")

    def check(self) -> None:
        if self.stream_options is not None and not self.stream:
            raise invalid("stream_options", "is only allowed with stream: true")
        if self.spaces_between_special_tokens is False:
            raise invalid("spaces_between_special_tokens", "is not supported: the tokenizer's decoder sets the blanks")

    def sampling(self, **renamed: Any) -> SamplingParams:
        return super().sampling(
            stop=[self.stop] if isinstance(self.stop, str) else self.stop,
            include_stop=self.include_stop_str_in_output,
            keep_special_tokens=self.skip_special_tokens is False,
            **renamed,
        )

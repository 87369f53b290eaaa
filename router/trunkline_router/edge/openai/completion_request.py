"""The body of POST /v1/completions."""

from array import array
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Union

from pydantic import Field, WithJsonSchema

from trunkline.status import invalid
from trunkline.v1.generation_pb2 import SamplingParams
from trunkline.v1.inference_pb2 import GenerateRequest
from trunkline_router.edge.request_fields import GenerationFields

DEFAULT_MAX_TOKENS = 16  # OpenAI's
MAX_LOGPROBS = 20
MAX_PROMPTS = 256
# What refusals name.
FIELD_NAMES = {"text": "prompt", "token_ids": "prompt"}
ECHO_NAMES = {**FIELD_NAMES, "prompt_logprobs": "logprobs"}

_PROMPT_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": MAX_PROMPTS},
        {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1},
        {
            "type": "array",
            "items": {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1},
            "minItems": 1,
            "maxItems": MAX_PROMPTS,
        },
    ]
}

GivenPrompt = str | list[Any]  # a text, or token ids as JSON has them
Prompt = Union[str, "array[int]"]


class CompletionRequest(GenerationFields):
    """Prompts to continue."""

    model: Annotated[str, Field(min_length=1)]
    # Checked by prompts(): pydantic would try every alternative on long lists.
    prompt: Annotated[Any, WithJsonSchema(_PROMPT_SCHEMA)]
    max_tokens: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    add_special_tokens: bool | None = None

    long_lists: ClassVar[frozenset[str]] = frozenset({"prompt"})

    unserved: ClassVar[Mapping[str, str]] = {**GenerationFields.unserved, "suffix": "is not supported"}

    def check(self) -> None:
        super().check()
        if self.max_tokens == 0 and not self.echo:
            raise invalid("max_tokens", "must be at least 1 unless echo is true")
        if self.echo and self.stream and self.prompt_logprobs is not None:
            raise invalid("prompt_logprobs", "is not supported for a stream with echo")

    @property
    def scores_prompt(self) -> bool:
        """Whether the answer has log-probabilities of the prompt's tokens."""
        return self.prompt_logprobs is not None or bool(self.echo and self.logprobs is not None)

    @property
    def computed_tokens(self) -> int:
        """max_tokens for the worker. One token is computed even if none is wanted, and left out of the answer."""
        return DEFAULT_MAX_TOKENS if self.max_tokens is None else max(1, self.max_tokens)

    @property
    def field_names(self) -> Mapping[str, str]:
        """What refusals name. Prompts are scored for `logprobs` with an echo, too."""
        return FIELD_NAMES if self.prompt_logprobs is not None else ECHO_NAMES

    def prompts(self) -> list[GivenPrompt]:
        """Returns the prompts, each a text or token ids, of which the first alone is checked. Raises RequestRefused
        (INVALID_REQUEST)."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if not isinstance(prompt, list) or not prompt:
            raise invalid("prompt", "must be a string, a list of strings, token ids, or a list of lists of token ids")
        if type(prompt[0]) is int:
            return [prompt]
        if len(prompt) > MAX_PROMPTS:
            raise invalid("prompt", f"{len(prompt)} prompts are more than {MAX_PROMPTS}")
        kinds = set(map(type, prompt))
        if kinds == {str} or (kinds == {list} and all(item and type(item[0]) is int for item in prompt)):
            return prompt
        raise invalid("prompt", "must be a string, a list of strings, token ids, or a list of lists of token ids")

    def sampling_params(self) -> SamplingParams:
        """Returns the parameters, which are the same for all prompts. Raises RequestRefused (INVALID_REQUEST)."""
        sampling = self.sampling(self.computed_tokens)
        if self.logprobs is not None:
            sampling.logprobs = self.logprobs
        if self.echo and self.logprobs is not None:
            sampling.prompt_logprobs = max(self.logprobs, self.prompt_logprobs or 0)
        return sampling

    def generate_request(self, prompt: Prompt, request_id: str, sampling: SamplingParams) -> GenerateRequest:
        """Returns the request for one of the prompts, without it if it is token ids."""
        request = GenerateRequest(
            model=self.model,
            sampling=sampling,
            n=self.n or 1,
            request_id=request_id,
            lane=self.lane,
            cache_salt=self.cache_salt or "",
            fit_max_tokens=self.max_tokens is None,
        )
        if isinstance(prompt, str):
            request.text = prompt
        return request

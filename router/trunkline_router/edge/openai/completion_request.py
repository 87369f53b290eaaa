"""The body of POST /v1/completions."""

from array import array
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Union

from pydantic import Field, WithJsonSchema

from trunkline.status import invalid
from trunkline.v1.generation_pb2 import SamplingParams
from trunkline.v1.inference_pb2 import GenerateRequest
from trunkline_router.edge.openai.chat import TopLogprobs
from trunkline_router.edge.openai.generation_fields import GenerationFields
from trunkline_router.edge.output_format import ResponseFormat
from trunkline_router.edge.request_fields import Constraint, FieldNames, ModelName, prompt_named

MAX_PROMPTS = 256
DEFAULT_MAX_TOKENS = 16  # OpenAI's

IDS_SCHEMA = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_SOME_IDS_SCHEMA = {**IDS_SCHEMA, "minItems": 1}
COMPLETION_NAMES = prompt_named("prompt")
ECHO_NAMES = prompt_named("prompt", prompt_logprobs="logprobs")

GivenPrompt = str | list[Any]  # a text, or token ids as JSON has them
Prompt = Union[str, "array[int]"]


def prompts_schema(most: int) -> dict[str, Any]:
    """The schema of a field that given_prompts() reads."""
    many = {"type": "array", "minItems": 1, "maxItems": most}
    texts, lists = {**many, "items": {"type": "string"}}, {**many, "items": _SOME_IDS_SCHEMA}
    return {"anyOf": [{"type": "string"}, texts, _SOME_IDS_SCHEMA, lists]}


def given_prompts(given: Any, field: str, most: int) -> list[GivenPrompt]:
    """Returns the prompts of a field, each a text or token ids, of which the first alone is checked. Raises
    RequestRefused (INVALID_REQUEST)."""
    if isinstance(given, str):
        return [given]
    if isinstance(given, list) and given:
        if type(given[0]) is int:
            return [given]
        if len(given) > most:
            raise invalid(field, f"{len(given)} prompts are more than {most}")
        kinds = set(map(type, given))
        if kinds == {str} or (kinds == {list} and all(item and type(item[0]) is int for item in given)):
            return given
    raise invalid(field, "must be a string, a list of strings, token ids, or a list of lists of token ids")


class CompletionRequest(GenerationFields):
    """Prompts to continue."""

    model: ModelName
    # Checked by prompts(): pydantic would try every alternative on long lists.
    prompt: Annotated[Any, WithJsonSchema(prompts_schema(MAX_PROMPTS))]
    max_tokens: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None
    echo: bool | None = None
    logprobs: TopLogprobs | None = None
    add_special_tokens: bool | None = None
    response_format: ResponseFormat | None = None  # as in vLLM

    long_lists: ClassVar[frozenset[str]] = frozenset({"prompt"})
    unserved: ClassVar[Mapping[str, str]] = {**GenerationFields.unserved, "suffix": "is not supported"}

    def check(self) -> None:
        super().check()
        if self.max_tokens == 0 and not self.echo:
            raise invalid("max_tokens", "must be at least 1 unless echo is true")
        if self.echo and self.stream and self.prompt_logprobs is not None:
            raise invalid("prompt_logprobs", "is not supported for a stream with echo")

    @property
    def format(self) -> Constraint | None:
        return None if self.response_format is None else self.response_format.constraint("response_format")

    @property
    def field_names(self) -> FieldNames:
        """What refusals name. Prompts are scored for `logprobs` with an echo, too."""
        return self.named(COMPLETION_NAMES if self.prompt_logprobs is not None else ECHO_NAMES)

    @property
    def prompt_top(self) -> int | None:
        """How many tokens the workers list beside each of the prompts'; None: prompts are not scored."""
        if self.echo and self.logprobs is not None:
            return max(self.logprobs, self.prompt_logprobs or 0)
        return self.prompt_logprobs

    def prompts(self) -> list[GivenPrompt]:
        """Returns the prompts. Raises RequestRefused (INVALID_REQUEST)."""
        return given_prompts(self.prompt, "prompt", MAX_PROMPTS)

    def sampling_params(self) -> SamplingParams:
        """Returns the parameters, which are the same for all prompts. One token is computed even if none is wanted, and
        left out of the answer."""
        max_tokens = DEFAULT_MAX_TOKENS if self.max_tokens is None else max(1, self.max_tokens)
        return self.sampling(max_tokens=max_tokens, prompt_logprobs=self.prompt_top)

    def generate_request(self, prompt: Prompt, request_id: str, sampling: SamplingParams) -> GenerateRequest:
        """Returns the request for one of the prompts, without it if it is token ids."""
        text = prompt if isinstance(prompt, str) else None
        return self.generate(request_id, sampling, text=text, n=self.n or 1, fit_max_tokens=self.max_tokens is None)

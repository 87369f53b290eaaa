"""The bodies of requests for vectors and scores."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, WithJsonSchema

from trunkline.status import invalid
from trunkline.v1.inference_pb2 import GenerateRequest
from trunkline.v1.worker_pb2 import OutputKind, Work
from trunkline.validation import WHOLE_OUTPUTS
from trunkline_router.edge.http.json_body import packed
from trunkline_router.edge.openai.completion_request import given_prompts, prompts_schema
from trunkline_router.edge.request_fields import (
    MOST_UINT32,
    NOT_YET,
    Count,
    FieldNames,
    Fields,
    lane_of,
    prompt_named,
)
from trunkline_router.request.inputs import MAX_INPUTS, GivenInput, Inputs

# -1: to what the model takes.
Truncation = Annotated[int, Field(ge=-1, le=MOST_UINT32)]
Texts = Annotated[Any, WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]})]
_DOCUMENT = {"anyOf": [{"type": "string"}, {"type": "object", "properties": {"text": {"type": "string"}}}]}
Documents = Annotated[Any, WithJsonSchema({"type": "array", "items": _DOCUMENT, "minItems": 1, "maxItems": MAX_INPUTS})]
GivenInputs = Annotated[Any, WithJsonSchema(prompts_schema(MAX_INPUTS))]
_RIGHT = "is not supported: inputs are cut off at their ends"


class PoolingFields(Fields):
    """What these requests have in common. Names that are not OpenAI's are vLLM's."""

    model: str | None = None
    truncate_prompt_tokens: Truncation | None = None
    use_activation: bool | None = None
    # Other values would change the output.
    add_special_tokens: Literal[True] | None = None
    embed_dtype: Literal["float32"] | None = None
    endianness: Literal["native", "little"] | None = None
    task: Literal["embed", "classify", "score"] | None = None
    priority: int | None = None
    cache_salt: Annotated[str, Field(max_length=256)] | None = None

    ignored: ClassVar[frozenset[str]] = frozenset({"user", "request_id"})
    unserved: ClassVar[Mapping[str, str]] = {
        "messages": "is not supported: send texts",
        "truncation_side": _RIGHT,
        "padding": NOT_YET,
        "mm_processor_kwargs": NOT_YET,
    }
    defaults: ClassVar[Mapping[str, Any]] = {"truncation_side": "right", "padding": "do_not_pad"}

    @property
    def field_names(self) -> FieldNames:
        """What refusals name."""
        return prompt_named("input", inputs="input")

    @property
    def truncate_to(self) -> int | None:
        return None if self.truncate_prompt_tokens is None else max(0, self.truncate_prompt_tokens)

    def inputs(self) -> Inputs:
        """Returns what to compute. Raises RequestRefused (INVALID_REQUEST)."""
        raise NotImplementedError

    def work(self, output: "OutputKind.ValueType") -> Work:
        """Returns what workers do with the inputs. Raises RequestRefused (INVALID_REQUEST) if another task is named."""
        if self.task is not None and (self.task == "embed") != (output == OutputKind.OUTPUT_KIND_VECTOR):
            raise invalid("task", f"is {self.task}, but the output is a {WHOLE_OUTPUTS[output]}")
        return Work(output=output, raw=self.use_activation is False)

    def generate_request(self, request_id: str) -> GenerateRequest:
        """Returns the request for the path that all protocols share, without its inputs."""
        return GenerateRequest(
            model=self.model or "",
            request_id=request_id,
            lane=lane_of(self.priority),
            cache_salt=self.cache_salt or "",
        )


class InputFields(PoolingFields):
    """Inputs that are prompts."""

    input: GivenInputs
    long_lists: ClassVar[frozenset[str]] = frozenset({"input"})

    def inputs(self) -> Inputs:
        given = given_prompts(self.input, "input", MAX_INPUTS)
        return Inputs(_taken(given, "input"), truncate_to=self.truncate_to)


class EmbeddingRequest(InputFields):
    """Inputs to embed."""

    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1, le=MOST_UINT32)] | None = None
    # As sentence-transformers names them.
    prompt_name: str | None = None
    prompt: str | None = None

    def inputs(self) -> Inputs:
        given = given_prompts(self.input, "input", MAX_INPUTS)
        return Inputs(
            _taken(given, "input"),
            prompt_name=self.prompt_name or "",
            prompt=self.prompt,
            truncate_to=self.truncate_to,
        )

    def work(self, output: "OutputKind.ValueType") -> Work:
        work = super().work(output)
        work.dimensions = self.dimensions or 0
        return work


class ClassifyRequest(InputFields):
    """Inputs to classify."""


class RerankFields(PoolingFields):
    """Documents to sort by their relevance for a query."""

    query: str
    documents: Documents
    top_n: Count | None = None
    return_documents: bool | None = None
    instruction: str | None = None

    long_lists: ClassVar[frozenset[str]] = frozenset({"documents"})
    unserved: ClassVar[Mapping[str, str]] = {
        **PoolingFields.unserved,
        "rank_fields": "is not supported: send a text for each document",
        "max_chunks_per_doc": "is not supported: a document is one input",
        "max_tokens_per_doc": "is not supported: truncate_prompt_tokens cuts query and document together",
        "max_tokens_per_query": "is not supported: truncate_prompt_tokens cuts query and document together",
    }

    @property
    def field_names(self) -> FieldNames:
        return prompt_named("documents", inputs="documents", queries="query")

    def texts(self) -> list[str]:
        """Returns the documents. Raises RequestRefused (INVALID_REQUEST)."""
        given = self.documents
        if not isinstance(given, list) or not given:
            raise invalid("documents", "must be a list of at least one text or object with a text")
        if len(given) > MAX_INPUTS:
            raise invalid("documents", f"{len(given)} documents are more than {MAX_INPUTS}")
        texts: list[Any] = [one.get("text") if isinstance(one, dict) else one for one in given]
        wrong = next((index for index, text in enumerate(texts) if not isinstance(text, str)), None)
        if wrong is not None:
            raise invalid(f"documents[{wrong}]", "is neither a text nor an object with a text")
        return texts

    def inputs(self) -> Inputs:
        return Inputs(self.texts(), [self.query], instruction=self.instruction or "", truncate_to=self.truncate_to)


class RerankRequest(RerankFields):
    """Documents to sort, as Jina and vLLM have it."""


class CohereRerankRequest(RerankFields):
    """Documents to sort, as Cohere has it."""

    model: str


# Pairs of names for queries and documents, as in vLLM.
PAIRS = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))


class ScoreBody(PoolingFields):
    """Pairs of texts to score: one text with each of others, or one by one. One pair of names is given."""

    text_1: Texts | None = None
    text_2: Texts | None = None
    queries: Texts | None = None
    documents: Texts | None = None
    items: Texts | None = None
    data_1: Texts | None = None
    data_2: Texts | None = None
    instruction: str | None = None

    long_lists: ClassVar[frozenset[str]] = frozenset(name for pair in PAIRS for name in pair)

    def check(self) -> None:
        given = {name for pair in PAIRS for name in pair if getattr(self, name) is not None}
        if not any(given == {*pair} for pair in PAIRS):
            raise invalid("text_1", "must be given, with text_2; or queries with documents")

    @property
    def names(self) -> tuple[str, str]:
        """The names that are given."""
        return next(pair for pair in PAIRS if getattr(self, pair[0]) is not None and getattr(self, pair[1]) is not None)

    @property
    def field_names(self) -> FieldNames:
        queries, documents = self.names
        return prompt_named(documents, inputs=documents, queries=queries)

    def inputs(self) -> Inputs:
        queries, documents = (_texts(getattr(self, name), name) for name in self.names)
        return Inputs(documents, queries, instruction=self.instruction or "", truncate_to=self.truncate_to)


def _texts(given: Any, field: str) -> Sequence[str]:
    """Returns one or several texts. Raises RequestRefused (INVALID_REQUEST)."""
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts, list) or not texts or set(map(type, texts)) != {str}:
        raise invalid(field, "must be a text or a list of texts")
    if len(texts) > MAX_INPUTS:
        raise invalid(field, f"{len(texts)} texts are more than {MAX_INPUTS}")
    return texts


def _taken(given: Sequence[str | list[Any]], field: str) -> list[GivenInput]:
    """Returns texts as they are, and token ids as arrays."""
    return [one if isinstance(one, str) else packed(one, field) for one in given]

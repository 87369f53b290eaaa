"""Decoders whose output is a vector or a score."""

from dataclasses import dataclass, replace
from pathlib import Path

from trunkline_worker.model.architectures.decoder_spec import DecoderSpec
from trunkline_worker.model.checkpoint.model_file import read_json
from trunkline_worker.model.checkpoint.refusals import ModelError
from trunkline_worker.model.pooling.pooling_spec import Activation, AnswerTokens, Pooling, PoolingSpec

# What Qwen3-Reranker was trained with (its model card), where {document} and the others stand for a request's texts.
QWEN3_RERANKER = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}<|im_end|>\n<|im_start|>assistant\n"
    "<think>\n\n</think>\n\n"
)
QWEN3_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"

CHAT_MARK = "<|im_start|>"
LAST_TOKEN = PoolingSpec(Pooling.LAST, (), Activation.NORMALIZE)  # of embedding models without modules.json


@dataclass(frozen=True, slots=True)
class PooledDecoder:
    """What loading must know of a decoder that makes no tokens."""

    spec: DecoderSpec
    pooling: PoolingSpec

    @property
    def needs_last_state_only(self) -> bool:
        return self.pooling.pooling is Pooling.LAST

    @property
    def vocab_size(self) -> int:
        return self.spec.vocab_size


def answer_tokens(directory: Path) -> PoolingSpec:
    """Returns the pooling of a model that generates, and was trained as Qwen3-Reranker was to answer a pair of texts
    with yes or no. Raises ModelError if its tokenizer does not have these words and the marks of the template."""
    path = directory / "tokenizer.json"
    match read_json(path):
        case {"model": {"vocab": {"yes": int(yes), "no": int(no)}}, "added_tokens": list(added)}:
            if any(isinstance(token, dict) and token.get("content") == CHAT_MARK for token in added):
                return PoolingSpec(Pooling.LAST, AnswerTokens(yes, no), Activation.SIGMOID, labels=("yes",))
    raise ModelError(
        f"{path} lacks the token yes, no or {CHAT_MARK}: of models that generate, those of the kind of Qwen3-Reranker "
        "can score"
    )


def with_template(spec: PoolingSpec) -> PoolingSpec:
    """Adds how Qwen3-Reranker takes a query and a document."""
    return replace(spec, pair_template=QWEN3_RERANKER, default_instruction=QWEN3_INSTRUCTION)

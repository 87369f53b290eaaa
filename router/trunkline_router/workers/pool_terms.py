"""The terms on which workers of one model must agree, and the values that apply where they may differ. Pure.

A request is checked and tokenized once for all workers of its model. So the workers must agree on the task, on the
vocabulary size, on how text becomes tokens, and on the prompts and dimensions of a model of vectors or scores: the most
common terms apply, and workers with other terms get no requests until theirs are the most common. Sampling defaults,
end-of-sequence tokens and the format of answers may differ, for example during a rolling update: the most common ones
apply to requests that do not set them. Context lengths and KV pools may differ too, and capabilities: requests go to
workers where they fit.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeVar

from trunkline.capabilities import GENERATE, name_of
from trunkline.v1.generation_pb2 import SamplingParams
from trunkline.v1.worker_pb2 import GetModelResponse, Task
from trunkline.validation import max_total_tokens

T = TypeVar("T")


class Terms(NamedTuple):
    """The values on which all workers of a model must agree."""

    vocab_size: int
    encoding: bytes  # identifies how text becomes tokens and tokens become text
    task: "Task.ValueType" = GENERATE
    pooling: bytes = b""  # a serialized PoolingModel: prompts, dimensions and labels


def deviation(own: Terms, others: Terms, count: int, of: int) -> str:
    """How a worker's terms differ from those of `count` of the model's `of` workers, in one line; "" if they do not."""
    if own.vocab_size != others.vocab_size:
        what = f"its vocabulary has {own.vocab_size} tokens, not {others.vocab_size} as"
    elif own.encoding != others.encoding:
        what = "its tokenizer produces other tokens than"
    elif own.task != others.task:
        what = f"its task is {name_of(own.task)}, not {name_of(others.task)} as"
    elif own.pooling != others.pooling:
        what = "its prompts, dimensions or labels differ from those"
    else:
        return ""
    return f"set aside: {what} at {count} of the model's {of} workers"


def limits_of(models: Sequence[GetModelResponse]) -> GetModelResponse:
    """The model description for requests to workers that agree: that of the worker that takes the longest requests,
    with the most common sampling defaults, end-of-sequence tokens and format of answers."""
    limits = GetModelResponse()
    limits.CopyFrom(max(models, key=max_total_tokens))
    defaults = most_common(model.default_sampling.SerializeToString(deterministic=True) for model in models)
    limits.default_sampling.CopyFrom(SamplingParams.FromString(defaults))
    limits.eos_token_ids[:] = most_common(tuple(model.eos_token_ids) for model in models)
    limits.answer_format = most_common(model.answer_format for model in models)
    return limits


def most_common(values: Iterable[T], preferred: T | None = None) -> T:
    """The most common value. Among equally common ones the preferred value, else the first."""
    counts = Counter(values)
    (_, most), *_ = counts.most_common(1)
    if preferred is not None and counts[preferred] == most:
        return preferred
    return next(value for value, count in counts.items() if count == most)

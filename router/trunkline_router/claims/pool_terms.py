"""What workers of one model must agree on, and what holds for all where they differ. Pure.

Requests of a model are checked and tokenized once, for whichever worker they go to. So its workers must agree on the
size of the vocabulary and on how text becomes tokens: most of them decide, and the others get nothing until they are
most. Defaults and ends of generation may differ, as while workers are replaced one by one: those of most count for
requests that leave them open. Context lengths and KV pools may differ too: requests go where they fit.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeVar

from trunkline.v1.generation_pb2 import SamplingParams
from trunkline.v1.worker_pb2 import GetModelResponse
from trunkline.validation import max_total_tokens

T = TypeVar("T")


class Terms(NamedTuple):
    """What must be equal. encoding: identifies how text becomes tokens, and tokens text"""

    vocab_size: int
    encoding: bytes


def agreed(terms: Sequence[Terms], before: Terms | None) -> Terms:
    """Those of most workers, of which there is at least one. Of equally many those from before, else the first."""
    return most_common(terms, before)


def deviation(own: Terms, others: Terms, count: int, of: int) -> str:
    """How a worker's terms differ from those of `count` workers `of` so many, in one line; empty where they do not."""
    if own.vocab_size != others.vocab_size:
        what = f"its vocabulary has {own.vocab_size} tokens, not {others.vocab_size} as"
    elif own.encoding != others.encoding:
        what = "its tokenizer makes other tokens of a text than"
    else:
        return ""
    return f"set aside: {what} at {count} of the model's {of} workers"


def limits_of(models: Sequence[GetModelResponse]) -> GetModelResponse:
    """A model's description for requests to workers that agree: the one of the most capable worker, with the defaults
    and ends of generation of most."""
    most_capable = max(models, key=max_total_tokens)
    defaults = most_common(model.default_sampling.SerializeToString(deterministic=True) for model in models)
    ends = most_common(tuple(model.eos_token_ids) for model in models)
    own_defaults = most_capable.default_sampling.SerializeToString(deterministic=True)
    if own_defaults == defaults and tuple(most_capable.eos_token_ids) == ends:
        return most_capable
    limits = GetModelResponse()
    limits.CopyFrom(most_capable)
    limits.default_sampling.CopyFrom(SamplingParams.FromString(defaults))
    limits.eos_token_ids[:] = ends
    return limits


def most_common(values: Iterable[T], preferred: T | None = None) -> T:
    """Of equally many the preferred one, else the first."""
    counts = Counter(values)
    (_, most), *_ = counts.most_common(1)
    if preferred is not None and counts[preferred] == most:
        return preferred
    return next(value for value, count in counts.items() if count == most)

"""The texts of requests for vectors and scores are bounded before they are put together."""

import tracemalloc
from collections.abc import Sequence
from typing import Any

import pytest

from tests.router.tokenizer_files import tokenizer_files
from trunkline.status import CONTEXT_LENGTH_EXCEEDED, INVALID_REQUEST, RequestRefused
from trunkline.v1.worker_pb2 import GetModelResponse, PoolingModel
from trunkline_router.prompts.helper_pool import Helpers
from trunkline_router.prompts.tokenizer import PromptTokenizer
from trunkline_router.request.inputs import MAX_CHARACTERS, MAX_INPUTS, Inputs, encode_inputs

LONG = "x" * 100_000
TEMPLATE = "{instruction} {query} {document} yes or no"


def limits(template: str = "") -> GetModelResponse:
    pooling = PoolingModel(labels=["s"], pair_template=template)
    return GetModelResponse(context_length=1 << 20, kv_token_capacity=1 << 20, vocab_size=1000, pooling=pooling)


@pytest.mark.parametrize(
    ("inputs", "template"),
    [
        (Inputs(["a"] * MAX_INPUTS, prompt=LONG), ""),
        (Inputs(["a"] * MAX_INPUTS, [LONG]), ""),
        (Inputs(["a"] * MAX_INPUTS, [LONG]), TEMPLATE),
        (Inputs(["a"] * MAX_INPUTS, ["b"] * MAX_INPUTS, instruction=LONG), TEMPLATE),
        (Inputs(["a"], ["b" * 1000]), "{query}" * (MAX_CHARACTERS // 1000 + 1) + "{document}"),
    ],
    ids=["prompt", "query of pairs", "query", "instruction", "template"],
)
async def test_texts_that_are_too_much_together_are_never_put_together(
    helpers: Helpers, inputs: Inputs, template: str
) -> None:
    tokenizer = PromptTokenizer(tokenizer_files(), helpers)
    tracemalloc.start()
    try:
        with pytest.raises(RequestRefused, match=f"more than {MAX_CHARACTERS}") as refused:
            await encode_inputs(inputs, tokenizer, limits(template), "")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (refused.value.reason, refused.value.field) == (INVALID_REQUEST, "inputs")
    assert peak < 8 << 20


class Ids(Sequence[int]):
    """As many token ids as it says, none of which may be read."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        raise AssertionError("it was read")


async def test_a_list_of_tokens_that_is_too_long_is_refused_unread(helpers: Helpers) -> None:
    tokenizer = PromptTokenizer(tokenizer_files(), helpers)
    with pytest.raises(RequestRefused) as refused:
        await encode_inputs(Inputs([Ids((1 << 20) + 1)]), tokenizer, limits(), "")
    assert (refused.value.reason, refused.value.field) == (CONTEXT_LENGTH_EXCEEDED, "inputs[0]")

"""Texts of requests for vectors and scores: many are encoded together, and what is cut off leaves an input."""

from array import array
from typing import Any

import pytest
from tokenizers import Tokenizer, processors

from tests.router.tokenizer_files import byte_tokenizer, tokenizer_files
from trunkline.status import INVALID_REQUEST, RequestRefused
from trunkline_router.prompts.helper_pool import JOB_BYTES, SHORT_PROCESSES, HelperPool, Helpers
from trunkline_router.prompts.tokenizer import (
    GROUP,
    GROUPS_AT_ONCE,
    EncodedInput,
    InputText,
    PromptTokenizer,
    read_encoded,
)

CLS, SEP = 1, 2
LONG = "one two three four"


def bert_like() -> Tokenizer:
    """One token per byte; special tokens around a text, and around both of a pair."""
    tokenizer = byte_tokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> $B:1 </s>:1", special_tokens=[("<s>", CLS), ("</s>", SEP)]
    )
    return tokenizer


async def encoded(helpers: Helpers, *inputs: InputText, **fields: Any) -> list[EncodedInput]:
    fields = {"special_tokens": True, "most_tokens": None, **fields}
    return await PromptTokenizer(tokenizer_files(bert_like()), helpers).encode_inputs(inputs, **fields)


@pytest.mark.parametrize(
    ("given", "least"),
    [
        (InputText(LONG), 3),
        (InputText("why", LONG), 5),
        (InputText(LONG, "why"), 5),
        (InputText(LONG, head="query: "), 10),
    ],
)
async def test_an_input_is_cut_to_no_less_than_a_token_of_each_text(
    helpers: Helpers, given: InputText, least: int
) -> None:
    (whole,) = await encoded(helpers, given)
    for most_tokens in range(1, len(whole.ids) + 1):
        if most_tokens < least:
            with pytest.raises(RequestRefused) as refused:
                await encoded(helpers, given, most_tokens=most_tokens)
            assert (refused.value.reason, refused.value.field) == (INVALID_REQUEST, "truncate_prompt_tokens")
            continue
        (cut,) = await encoded(helpers, given, most_tokens=most_tokens)
        assert (len(cut.ids), cut.num_cut) == (most_tokens, len(whole.ids) - most_tokens)
        assert list(cut.ids).count(SEP) == list(whole.ids).count(SEP)
        assert given.pair is None or SEP not in (cut.ids[1], cut.ids[cut.first_segment]), "a token of each"


async def test_only_the_document_of_a_template_is_cut(helpers: Helpers) -> None:
    head, tail = "query: why document: ", " yes or no"
    given = InputText(LONG, head=head, tail=tail)
    around = len(head) + len(tail)
    with pytest.raises(RequestRefused, match="leaves no room"):
        await encoded(helpers, given, special_tokens=False, most_tokens=around)
    for num_kept in (1, 5):
        (cut,) = await encoded(helpers, given, special_tokens=False, most_tokens=around + num_kept)
        (kept,) = await encoded(helpers, InputText(head + LONG[:num_kept] + tail), special_tokens=False)
        assert cut == EncodedInput(kept.ids, 0, len(LONG) - num_kept)


async def test_texts_that_inputs_share_are_encoded_with_each(helpers: Helpers) -> None:
    given = [InputText(f"{index}", head="a" * 9000) for index in range(5)]
    found = await encoded(helpers, *given)
    for index, each in enumerate(found):
        assert each == (await encoded(helpers, InputText("a" * 9000 + f"{index}")))[0]


class SmallPool(HelperPool):
    """An account of it has memory for so many groups as a request converts at the same time. It counts its jobs."""

    def __init__(self) -> None:
        super().__init__(SHORT_PROCESSES, max_bytes=2 * GROUPS_AT_ONCE * (4 * GROUP + JOB_BYTES))
        self.num_jobs = 0

    async def run(self, *arguments: Any, **options: Any) -> bytes:
        self.num_jobs += 1
        return await super().run(*arguments, **options)


async def test_a_request_with_more_text_than_an_account_has_memory_for_is_encoded(helpers: Helpers) -> None:
    helpers.short = pool = SmallPool()
    found = await encoded(helpers, *[InputText(f"{index % 10}" * GROUP) for index in range(20)])
    assert pool.num_jobs == 20
    tokenizer = bert_like()
    assert [one.ids[1] for one in found] == [tokenizer.encode(f"{index % 10}").ids[1] for index in range(20)]


async def test_after_the_first_refusal_nothing_more_is_encoded(helpers: Helpers) -> None:
    helpers.short = pool = SmallPool()
    refused = InputText("b" * (GROUP - 100), tail="x" * 100)
    with pytest.raises(RequestRefused, match="leaves no room"):
        await encoded(helpers, *[refused] * 20, most_tokens=50)
    assert pool.num_jobs <= GROUPS_AT_ONCE
    assert not pool._accounts


GOOD = [2, 0, 1, 7, 8, 3, 2, 0, 7, 8, 9]  # of two inputs


def test_an_answer_is_read_as_written() -> None:
    assert read_encoded(array("i", GOOD).tobytes(), 2, [5], [6]) == [
        EncodedInput(array("i", [5, 7, 8, 6]), 0, 1),
        EncodedInput(array("i", [5, 7, 8, 9, 6]), 3, 0),
    ]


@pytest.mark.parametrize(
    "answer",
    [
        [],
        GOOD[:-1],
        [*GOOD, 1],
        [-3, 0, 0, *GOOD[5:]],
        [-1, *GOOD[1:]],
        [2, 3, *GOOD[2:]],
        [2, -1, *GOOD[2:]],
        [2, 0, -1, *GOOD[3:]],
        [(1 << 31) - 1, *GOOD[1:]],
        [*GOOD, *GOOD],
    ],
    ids=str,
)
def test_an_answer_of_a_hostile_process_is_refused(answer: list[int]) -> None:
    with pytest.raises(RequestRefused, match="damaged answer") as refused:
        read_encoded(array("i", answer).tobytes(), 2)
    assert (refused.value.reason, refused.value.field) == (INVALID_REQUEST, "inputs")


def test_an_answer_that_ends_within_a_number_is_refused() -> None:
    with pytest.raises(RequestRefused, match="damaged answer"):
        read_encoded(array("i", GOOD).tobytes() + b"x", 2)

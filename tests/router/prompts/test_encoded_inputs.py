"""Texts of requests for vectors and scores: many are encoded together, and what is cut off leaves an input."""

from typing import Any

import pytest
from tokenizers import Tokenizer, processors

from tests.router.tokenizer_files import byte_tokenizer, tokenizer_files
from trunkline.status import INVALID_REQUEST, RequestRefused
from trunkline_router.prompts.helper_pool import Helpers
from trunkline_router.prompts.tokenizer import EncodedInput, InputText, PromptTokenizer

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

"""Long lists of token ids and long texts become answers in steps, and answers are what clients expect."""

from array import array
from collections.abc import Coroutine
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from trunkline.v1.inference_pb2 import DetokenizeResponse, TokenizeResponse
from trunkline_router.prompts.token_ids import PIECE, detokenize_response, read_ids, tokenize_response

VOCAB_SIZE = 1 << 20


def steps(coming: Coroutine[Any, Any, Any]) -> tuple[int, Any]:
    """In how many steps of an event loop it is done, and what it returns."""
    count = 0
    while True:
        count += 1
        try:
            coming.send(None)
        except StopIteration as done:
            return count, done.value


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 6 * PIECE), st.integers(0, 2**32))
def test_ids_are_read_and_answered_with_a_piece_in_each_step(count: int, seed: int) -> None:
    ids = array("i", ((seed + 7919 * index) % VOCAB_SIZE for index in range(count)))
    num_steps, wire = steps(tokenize_response(ids))
    assert list(TokenizeResponse.FromString(wire).token_ids) == list(ids)
    assert num_steps == max(1, -(-count // PIECE))
    num_steps, read = steps(read_ids(ids, vocab_size=VOCAB_SIZE, field="token_ids"))
    assert read == ids
    assert num_steps >= max(1, count // PIECE)


@settings(max_examples=60, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"])), st.integers(0, 3000))
def test_a_text_is_answered_as_it_is(text: str, times: int) -> None:
    assert DetokenizeResponse.FromString(detokenize_response((text * times).encode())).text == text * times

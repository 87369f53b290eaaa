"""The ledger of an answer, filled from a worker's chunks or from a client's claims."""

import pytest

from trunkline.ledger import AnswerLedger, OutOfOrder
from trunkline.v1.generation_pb2 import FinishReason, OutputChunk
from trunkline.v1.inference_pb2 import PromptInfo, Usage

STOP = FinishReason.FINISH_REASON_STOP


def chunk(index: int, first: int, count: int, **more: object) -> OutputChunk:
    tokens = range(first, first + count)
    return OutputChunk(index=index, first_token_index=first, token_ids=tokens, **more)  # type: ignore[arg-type]


def test_what_chunks_bring_is_counted_over_all_choices() -> None:
    answer = AnswerLedger(3)
    assert (answer.has_output, answer.num_output, answer.longest_output()) == (False, 0, None)
    assert [answer.add(chunk(0, 0, 5, finish_reason=STOP)), answer.add(chunk(1, 0, 2)), answer.add(chunk(1, 2, 1))] == [
        5,
        2,
        1,
    ]
    assert (answer.completion_tokens, answer.num_unfinished, answer.num_output) == (8, 2, 3)
    longest = answer.longest_output()
    assert longest is not None
    assert list(longest) == [0, 1, 2], "of those that are not finished"
    assert [choice for choice, _ in answer.unfinished()] == [1, 2]
    usage = answer.usage(PromptInfo(prompt_tokens=9, cached_tokens=4), resumptions=1)
    assert usage == Usage(prompt_tokens=9, cached_tokens=4, completion_tokens=8, resumptions=1)


@pytest.mark.parametrize("wrong", [chunk(0, 3, 1), chunk(0, 0, 1), chunk(1, 0, 1), chunk(0, 2, 1, text_offset=7)])
def test_of_a_chunk_that_does_not_follow_nothing_is_taken(wrong: OutputChunk) -> None:
    answer = AnswerLedger(1)
    answer.add(chunk(0, 0, 2))
    with pytest.raises(OutOfOrder):
        answer.add(wrong)
    assert (answer.completion_tokens, answer.num_unfinished) == (2, 1)


def test_claims_count_as_chunks_do() -> None:
    answer = AnswerLedger(2)
    answer.claim(0, [1, 2, 3], 3, finished=False)
    assert (answer.completion_tokens, answer.num_output) == (3, 3)
    answer.claim(0, [1, 2, 3, 4], 4, finished=False)
    answer.claim(1, [7], 1, finished=False)
    assert (answer.completion_tokens, answer.num_unfinished) == (5, 2)
    answer.claim(1, [], 0, finished=True)
    assert (answer.completion_tokens, answer.num_unfinished) == (5, 1), (
        "tokens that are left out are there all the same"
    )
    answer.claim(1, [], 0, finished=True)
    assert answer.num_unfinished == 1
    ((_, ledger),) = answer.unfinished()
    resume = ledger.resume()
    assert resume is not None
    assert (list(resume.output_token_ids), resume.text_bytes_sent) == ([1, 2, 3, 4], 4)


def test_past_its_bound_an_answer_is_counted_and_kept_no_longer_whoever_says_so() -> None:
    by_chunks, by_claims = AnswerLedger(1, max_bytes=12), AnswerLedger(1, max_bytes=12)
    for count in (3, 4):
        by_chunks.add(chunk(0, by_chunks.completion_tokens, count - by_chunks.completion_tokens))
        by_claims.claim(0, range(count), 0, finished=False)
        assert by_chunks.can_resume is by_claims.can_resume is (count == 3)
    assert by_chunks.completion_tokens == by_claims.completion_tokens == 4
    assert by_chunks.longest_output() is by_claims.longest_output() is None

"""Log-probabilities of a whole prompt are serialized like messages made one by one."""

from hypothesis import given
from hypothesis import strategies as st

from trunkline.v1.generation_pb2 import PromptReport, TokenLogprob, TokenLogprobs
from trunkline_worker.step.logprob_bytes import prompt_logprobs_bytes
from trunkline_worker.step.plan import PositionLogprobs

token_ids = st.integers(0, 2**31 - 1)
logprobs = st.floats(max_value=0.0, width=32, allow_nan=False)


def positions(num_top: int) -> st.SearchStrategy[list[PositionLogprobs]]:
    top = st.lists(st.tuples(token_ids, logprobs), min_size=num_top, max_size=num_top)
    return st.lists(st.builds(PositionLogprobs, token_ids, logprobs, st.integers(1, 2**32 - 1), top), max_size=20)


@given(st.integers(0, 20).flatmap(positions))
def test_each_position_is_the_message_that_says_it(found: list[PositionLogprobs]) -> None:
    read = PromptReport.FromString(prompt_logprobs_bytes(found))
    assert read.logprobs == [
        TokenLogprobs(
            chosen=TokenLogprob(token_id=one.token_id, logprob=one.logprob, rank=one.rank),
            top=[TokenLogprob(token_id=t, logprob=p, rank=rank) for rank, (t, p) in enumerate(one.top, start=1)],
        )
        for one in found
    ]
    written = read.SerializeToString()
    assert written == PromptReport(logprobs=list(read.logprobs)).SerializeToString(), "and is no longer than it must be"

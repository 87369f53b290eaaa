"""What a worker says of a choice's decoding is brought within what can be true."""

from math import inf, nan

from hypothesis import given
from hypothesis import strategies as st

from trunkline.v1.worker_pb2 import SampledStep, Timeline
from trunkline_router.workers.output_claims import believed_timeline

END_S = 3.0
MOST_STEPS = 16  # what the contract allows

times = st.one_of(st.floats(), st.sampled_from([nan, inf, -inf, -1.0]), st.floats(0.0, END_S))
steps = st.builds(SampledStep, at_s=times, duration_s=times)


@given(times, times, st.lists(steps, max_size=MOST_STEPS))
def test_sampled_steps_are_in_order_and_within_the_choice(
    detokenize_s: float, awaited_s: float, told: list[SampledStep]
) -> None:
    timeline = Timeline(ended_s=END_S, detokenize_s=detokenize_s, awaited_s=awaited_s, sampled_steps=told)
    timeline = believed_timeline(timeline, END_S, 0)
    at_s = [step.at_s for step in timeline.sampled_steps]
    assert at_s == sorted(at_s)
    assert all(0.0 <= step.duration_s <= step.at_s <= END_S for step in timeline.sampled_steps)
    assert 0.0 <= timeline.detokenize_s <= END_S
    assert 0.0 <= timeline.awaited_s <= END_S


def test_what_can_be_true_is_left_alone() -> None:
    told = Timeline(ended_s=END_S, detokenize_s=0.1, sampled_steps=[SampledStep(at_s=2.0, duration_s=0.5)])
    believed = Timeline()
    believed.CopyFrom(told)
    assert believed_timeline(believed, END_S, 0) == told

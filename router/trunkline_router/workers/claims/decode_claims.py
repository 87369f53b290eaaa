"""Checks what a timeline says of its choice's decoding, beyond what timeline_claims.py checks."""

from operator import attrgetter

from trunkline.v1.worker_pb2 import Timeline
from trunkline_router.workers.claims.timeline_claims import within

MAX_SAMPLED_STEPS = 16  # what the contract allows


def believed_decode(believed: Timeline) -> Timeline:
    """Returns the timeline, whose end is checked, with sampled steps that are few, in order, and not after its end."""
    if len(believed.sampled_steps) > MAX_SAMPLED_STEPS:
        del believed.sampled_steps[MAX_SAMPLED_STEPS:]
        believed = Timeline.FromString(believed.SerializeToString())  # what is deleted stays in a message's memory
    end_s = believed.ended_s
    if not 0.0 <= believed.detokenize_s <= end_s:
        believed.detokenize_s = within(believed.detokenize_s, 0.0, end_s)
    steps = believed.sampled_steps
    if steps:
        for step in steps:
            step.at_s = within(step.at_s, 0.0, end_s)
            step.duration_s = within(step.duration_s, 0.0, step.at_s)
        steps.sort(key=attrgetter("at_s"))
    return believed

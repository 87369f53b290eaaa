"""The work of a step, summed over its sequences."""

from typing import NamedTuple

from trunkline_worker.step.model_work import num_pairs
from trunkline_worker.step.plan import StepPlan


class StepWork(NamedTuple):
    """The work of one step, or of the first repetition of a plan that repeats."""

    num_tokens: int  # real tokens, of decodes and chunks
    num_padding: int  # padding positions
    num_sampled: int  # rows that need logits
    num_sequences: int
    decode_kv_tokens: int  # context lengths of sequences with one token, summed
    chunk_kv_tokens: int  # context lengths of the others, summed
    chunk_pairs: float  # (query, key) pairs of the others, causal

    @property
    def num_rows(self) -> int:
        """Rows of the matrix products."""
        return self.num_tokens + self.num_padding


def work_of(plan: StepPlan) -> StepWork:
    """The work of a plan."""
    tokens = sampled = decode_kv = chunk_kv = 0
    pairs = 0.0
    for _, _, num_computed, num_new, _, samples in plan.steps:
        tokens += num_new
        sampled += samples
        context = num_computed + num_new
        if num_new == 1:
            decode_kv += context
        else:
            chunk_kv += context
            pairs += num_pairs(num_computed, num_new)
    sampled += sum(run.num_samples - 1 for run in plan.runs.values())
    if plan.padding is not None:
        decode_kv += plan.padding.kv_tokens
        pairs += plan.padding.pairs
    return StepWork(tokens, plan.num_padding, sampled, len(plan.steps), decode_kv, chunk_kv, pairs)

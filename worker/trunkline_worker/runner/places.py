"""Where a step samples, and what its entries get: one token each, or those of a run."""

from collections.abc import Container, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from trunkline_worker.runner.batch_rows import SampledRow
from trunkline_worker.step.plan import Masks, PositionLogprobs, RowError, StepPlan, StepResult


def late_entries(plan: StepPlan, masks: Masks) -> set[int]:
    """The entries of a plan that lack their mask."""
    return {index for index in plan.masked if index not in masks}


@dataclass(slots=True)
class Places:
    """The samples of a step, each addressed by its entry and the position of its token.

    A usual entry that samples has one, after its last token. An entry with a run has one at each draft, and one after
    them. If its log-probabilities are requested, it also has one at each forced token: this one is not drawn.
    """

    entries: list[int]  # of each sample, in order: indices of the plan's steps
    # Only if an entry has a run:
    positions: list[int] | None = None  # of each sample
    spans: dict[int, range] = field(default_factory=dict)  # by entry: indices of its samples
    forced: dict[int, int] = field(default_factory=dict)  # tokens by index of the sample

    @classmethod
    def of(cls, plan: StepPlan, rows: Sequence[SampledRow], late: Container[int] = ()) -> "Places":
        """The samples of a plan.  rows: of its steps; late: entries that lack their mask, and so have no samples"""
        entries = [index for index, step in enumerate(plan.steps) if step.samples]
        if late:
            entries = [index for index in entries if index not in late]
        if not plan.runs:
            return cls(entries)
        places = cls([], [])
        for index in entries:
            places._add(index, plan, is_scored=rows[index].sampling.logprobs is not None)
        return places

    def _add(self, index: int, plan: StepPlan, *, is_scored: bool) -> None:
        """Adds the samples of an entry."""
        step, run = plan.steps[index], plan.runs.get(index)
        end, count = step.num_computed + step.num_new, 1
        start = len(self.entries)
        if run is not None:
            count = run.num_samples
            if is_scored:
                self.forced.update(enumerate(run.token_ids[: run.num_forced], start))
                count += run.num_forced
        self.entries += [index] * count
        assert self.positions is not None
        self.positions += range(end + 1 - count, end + 1)
        self.spans[index] = range(start, start + count)

    def number(self, plan: StepPlan, last: NDArray[np.int32]) -> NDArray[np.int32]:
        """The token before each sample, as a number in the step.  last: [num_steps] the number of each entry's last
        token"""
        numbers = last[self.entries]
        if self.positions is not None:
            ends = [plan.steps[index].num_computed + plan.steps[index].num_new for index in self.entries]
            numbers = numbers - np.array(ends, np.int32) + np.array(self.positions, np.int32)
        return numbers

    def masks(self, masks: Masks) -> dict[int, NDArray[np.int32]]:
        """The masks by index of the sample: [ceil(vocab / 32)] each."""
        if self.positions is None:
            return {i: masks[index][0] for i, index in enumerate(self.entries) if index in masks}
        # The samples at forced tokens come first, and have no masks.
        return {
            i: mask
            for index, span in self.spans.items()
            if index in masks
            for i, mask in zip(span[len(span) - len(masks[index]) :], masks[index], strict=True)
        }

    def result(
        self,
        plan: StepPlan,
        tokens: Sequence[int | None],
        logprobs: dict[int, PositionLogprobs],
        errors: dict[int, RowError],
    ) -> StepResult:
        """What the plan's entries get.  tokens: of each sample, None where it has an error; logprobs, errors: by index
        of the sample"""
        result, entries = StepResult(plan.step_id, [None] * len(plan.steps)), self.entries
        if self.positions is None:
            if len(entries) == len(plan.steps):
                result.token_ids = list(tokens)
            else:
                for index, token_id in zip(entries, tokens, strict=True):
                    result.token_ids[index] = token_id
            result.logprobs = {entries[i]: [entry] for i, entry in logprobs.items()}
            result.errors = {entries[i]: error for i, error in errors.items()}
            return result
        for index, span in self.spans.items():
            of_entry: list[int | None] = [tokens[i] for i in span]
            run = plan.runs.get(index)
            num_scored = 0  # forced tokens that have samples
            if run is not None:
                num_scored = len(span) - run.num_samples
                of_entry = of_entry[:num_scored] + run.taken(of_entry[num_scored:])[run.num_forced :]
            # A sample after a draft that was not taken is of no account, nor is its error.
            failed = [i for i, token_id in zip(span, of_entry, strict=False) if token_id is None]
            if failed:
                result.errors[index] = errors[failed[0]]
                continue
            taken = [token_id for token_id in of_entry if token_id is not None]
            if run is None:
                result.token_ids[index] = taken[0]
            else:
                result.runs[index] = [*run.token_ids[: run.num_forced], *taken[num_scored:]]
            if taken and span.start in logprobs:
                result.logprobs[index] = [logprobs[i] for i in span[: len(taken)]]
        return result

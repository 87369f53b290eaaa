"""Runs: tokens of a sequence that are known before they are computed, such as drafts, or what a grammar forces."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from trunkline_worker.cache.blocks import KVBlocks
from trunkline_worker.cache.sequence import Sequence
from trunkline_worker.scheduler.admission import Admission
from trunkline_worker.scheduler.running_set import RunningSet
from trunkline_worker.scheduler.step_budget import StepBudget
from trunkline_worker.scheduler.waiting import Waiting
from trunkline_worker.step.plan import Run, SequenceStep


class Proposer(Protocol):
    """Proposes runs. An exception ends the sequence for which it is raised."""

    def follows(self, sequence: Sequence) -> bool:
        """Whether it may propose something for a sequence, all of whose tokens are known."""

    def holds(self, sequence: Sequence) -> bool:
        """Whether the next step of a sequence waits, for its pending token or for what the proposer needs."""

    def propose(self, sequence: Sequence, most: int) -> Run | None:
        """What follows the tokens of a sequence. A step can compute `most` of the run's tokens; the rest is left out,
        and may be proposed again."""


@dataclass(slots=True, eq=False, kw_only=True)
class RunScheduling:
    """Adds runs to the entries of a step.

    Runs take what the step has left: tokens, blocks that are free without preemption, and samples, of which a step has
    no more than sequences can run. No entry loses its own token to a run. Blocks of drafts that are not taken stay in
    the block table, because block tables only grow; the sequence fills them later.
    """

    running: RunningSet
    waiting: Waiting
    blocks: KVBlocks
    admission: Admission
    most_samples: int  # of a step
    proposer: Proposer | None = None  # None: there are no runs
    planned: dict[int, Run] = field(default_factory=dict, init=False)  # by index of the step's entries

    def ready(self, order: list[Sequence]) -> list[Sequence]:
        """The sequences that need not wait."""
        proposer = self.proposer
        if proposer is None:
            return order
        return [sequence for sequence in order if not self._is(proposer.holds, sequence)]

    def extend(self, sequence: Sequence, index: int, steps: list[SequenceStep], budget: StepBudget) -> None:
        """Adds a run to a sequence's entry, which has just been planned and computes its last known token."""
        proposer, step = self.proposer, steps[index]
        if proposer is None or not self._is(proposer.follows, sequence):
            return
        known = len(sequence.token_ids)
        taken = len(self.running.members) + self.waiting.num_ready + budget.num_in_runs
        left = budget.tokens_for(sequence)
        most = max(0, min(left, self.most_samples - taken, sequence.last_to_compute - known))
        try:
            proposed = proposer.propose(sequence, most)
        except Exception as error:  # one sequence's error must not end the engine
            self.running.faults.append((sequence.sequence_id, error))
            return
        run = proposed and proposed.first(most)
        if not run:
            return
        new_blocks: list[int] = []
        missing = self.blocks.num_missing(sequence, known + run.num_new)
        if missing and self.blocks.can_grow(missing, self.admission.reserve_for(sequence, self.running.members)):
            new_blocks = self.blocks.grow(sequence, missing)
        elif missing:
            run = run.first(len(sequence.block_table) * self.blocks.block_size - known)
            if not run:
                return
        steps[index] = step._replace(num_new=step.num_new + run.num_new, new_blocks=[*step.new_blocks, *new_blocks])
        self.planned[index] = run
        budget.take_run(sequence, run)
        sequence.num_scheduled += run.num_new
        sequence.num_pending = run.num_new  # nothing is planned on what follows the run before it is committed

    def _is(self, asked: Callable[[Sequence], bool], sequence: Sequence) -> bool:
        try:
            return asked(sequence)
        except Exception as error:  # one sequence's error must not end the engine
            self.running.faults.append((sequence.sequence_id, error))
            return False

    def take_planned(self) -> dict[int, Run]:
        """The runs of the step that has been planned; called once for each plan."""
        planned, self.planned = self.planned, {}
        return planned

"""Sequences whose output a grammar constrains.

The grammar process answers, for the output of a sequence so far, which tokens must follow and which may follow after
these. An answer holds until a token is committed that it left open; then the process is told and answers again, while
the next step runs. What is forced depends on the output alone, not on when an answer arrives.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trunkline.engine.v1.engine_pb2 import EngineStep
from trunkline.v1.worker_pb2 import Grammar
from trunkline_worker.cache.sequence import AwaitedResource, Sequence
from trunkline_worker.grammar.grammar_link import Allowed, Broken, Compiled, GrammarLink, Refused
from trunkline_worker.step.plan import Run, SequenceStart, StepPlan


def awaited(digest: bytes) -> AwaitedResource:
    """What a sequence awaits until its grammar is compiled."""
    return AwaitedResource("grammar", digest)


@dataclass(slots=True, eq=False)
class Guided:
    """What is known of one sequence."""

    sequence: Sequence
    digest: bytes
    min_tokens: int  # below it, end tokens are left out of masks, if they leave any other token
    has_begun: bool = False  # the grammar process knows it
    answer: Allowed | None = None  # None: it has not arrived
    sat_out: bool = False  # the answer was late for a step


class GuidedSequences:
    """The scheduler's masker and proposer.

    sequences: those that run or wait, by id: others have ended
    """

    def __init__(self, link: GrammarLink, sequences: Mapping[int, Sequence], vocab_size: int) -> None:
        self._link = link
        self._sequences = sequences
        self._num_words = -(-vocab_size // 32)  # of a mask
        self._guided: dict[int, Guided] = {}

    def __len__(self) -> int:
        return len(self._guided)

    def fileno(self) -> int:
        """Of what is readable when exchange() has news."""
        return self._link.fileno()

    # Between the engine and the grammar process

    def add(self, sequence: Sequence, grammar: Grammar, min_tokens: int) -> None:
        """Takes in a new sequence, which awaits its grammar.  grammar: complete, its digest verified"""
        sequence.awaits |= {awaited(grammar.digest)}
        self._guided[sequence.sequence_id] = Guided(sequence, grammar.digest, min_tokens)
        self._link.compile(grammar.digest, grammar.kind, grammar.text, sequence.account.tenant)

    def begin(self, starts: Iterable[SequenceStart]) -> None:
        """Asks for the first answers of sequences that start to be computed. A preempted one has its answer already."""
        for start in starts:
            guided = self._guided.get(start.sequence_id)
            if guided is not None and not guided.has_begun:
                sequence, guided.has_begun = guided.sequence, True
                self._link.begin(sequence.sequence_id, guided.digest, sequence.token_ids[sequence.prompt_len :])
        self._flush()

    def advance(self, plan: StepPlan) -> None:
        """Tells what a plan that was committed has added."""
        for index in {*plan.masked, *plan.runs}:
            sequence = self._sequences.get(plan.steps[index].sequence_id)
            guided = None if sequence is None else self._guided.get(sequence.sequence_id)
            if sequence is None or guided is None or guided.answer is None or _num_forced(guided) >= 0:
                continue
            told = sequence.prompt_len + guided.answer.num_output
            self._link.advance(sequence.sequence_id, sequence.token_ids[told:])
            guided.answer = None
        self._flush()

    def _flush(self) -> None:
        """Sends what is new. Sequences that have ended are forgotten."""
        for sequence_id in self._guided.keys() - self._sequences.keys():
            guided = self._guided.pop(sequence_id)
            if guided.has_begun:
                self._link.end(sequence_id)
            else:
                self._link.withdraw(guided.digest)
        self._link.flush()

    def exchange(self) -> list[Compiled | Refused | Broken]:
        """Sends what is new, and takes in what has arrived. Returns what concerns the engine."""
        self._flush()
        news: list[Compiled | Refused | Broken] = []
        for item in self._link.take():
            if not isinstance(item, Allowed):
                news.append(item)
            elif (guided := self._guided.get(item.sequence_id)) is not None:
                guided.answer, guided.sat_out = item, False
        return news

    def tick(self) -> float | None:
        """Seconds until exchange() and tick() must be called again, whatever happens; None: nothing is outstanding."""
        return self._link.tick()

    def report(self, step: EngineStep) -> None:
        """Says what metrics count."""
        events = self._link.events
        for outcome, seconds in events.compiles:
            step.compile_outcomes.append(outcome)
            step.compile_s.append(seconds)
        events.compiles.clear()
        if events.lost_processes:
            step.lost_grammar_processes, events.lost_processes = events.lost_processes, 0

    def has_masks(self, plan: StepPlan) -> bool:
        """Whether no mask of a plan is outstanding."""
        found = [self._guided.get(plan.steps[index].sequence_id) for index in plan.masked]
        return all(guided is None or guided.answer is not None for guided in found)

    # Masker

    def constrains(self, sequence: Sequence) -> bool:
        return sequence.sequence_id in self._guided

    def masks(self, sequence: Sequence, run: Run | None) -> NDArray[np.int32] | None:
        guided = self._guided[sequence.sequence_id]
        answer = guided.answer
        if answer is None:
            guided.sat_out = True
            return None
        position = sequence.num_output + (0 if run is None else len(run.token_ids))
        num_after = position - answer.num_output
        if num_after < len(answer.forced):
            return self._only([answer.forced[num_after]])
        assert answer.mask is not None, "a token after the end of the grammar"
        mask = answer.mask[None]
        if position < guided.min_tokens and (ends := sequence.end_token_ids):
            longer = mask & ~self._only(ends)
            mask = longer if longer.any() else mask
        return mask

    def _only(self, token_ids: Iterable[int]) -> NDArray[np.int32]:
        """The mask that allows these tokens alone."""
        at = np.fromiter(token_ids, np.int64)
        mask = np.zeros((1, self._num_words), np.uint32)
        np.bitwise_or.at(mask[0], at >> 5, np.uint32(1) << (at & 31).astype(np.uint32))
        return mask.view(np.int32)

    # Proposer

    def follows(self, sequence: Sequence) -> bool:
        guided = self._guided.get(sequence.sequence_id)
        return guided is not None and _num_forced(guided) > 0

    def holds(self, sequence: Sequence) -> bool:
        guided = self._guided.get(sequence.sequence_id)
        if guided is None:
            return False
        if guided.answer is None:
            return guided.sat_out  # without its mask, its last token would be computed for nothing once more
        # The token that is sampled now is the first forced one. Waiting for it pays if two more can follow at once.
        return sequence.num_pending > 0 and _num_forced(guided) > 2

    def propose(self, sequence: Sequence, most: int) -> Run | None:
        guided = self._guided[sequence.sequence_id]
        answer, count = guided.answer, _num_forced(guided)
        if answer is None or not count:
            return None
        start = len(answer.forced) - count
        part = answer.forced[start : start + most + 2]  # a long document may be forced, and a step takes little of it
        # After the last token, another one is sampled unless the output ends.
        is_last = len(part) == count and answer.mask is None
        return Run(part, len(part), len(part) - is_last)


def _num_forced(guided: Guided) -> int:
    """How many tokens must follow those of the sequence, as far as that is known; -1: the answer is used up."""
    answer = guided.answer
    return 0 if answer is None else answer.num_output + len(answer.forced) - guided.sequence.num_output

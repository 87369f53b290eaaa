"""Runs of tokens: whatever is proposed, sequences get the tokens that they would get one by one, and nothing leaks."""

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest

from tests.worker.fake_executor import VOCAB, HistoryExecutor
from tests.worker.rig import Rig
from tests.worker.scheduling.maskers import Climbing, climbing
from tests.worker.scheduling.proposers import RandomProposer
from trunkline_worker.cache.sequence import Finish, Sequence
from trunkline_worker.scheduler.limits import AdmissionRule, Batching
from trunkline_worker.step.lanes import Lane
from trunkline_worker.step.plan import PositionLogprobs, Run


def continuation(tokens: list[int], sequence: Sequence, *, constrained: bool) -> list[int]:
    """The output tokens that follow `tokens` in a sequence, one by one."""
    tokens, sampling = list(tokens), sequence.sampling
    start = len(tokens)
    while len(tokens) - sequence.prompt_len < sampling.max_tokens:
        mask = climbing(VOCAB, tokens[-1]) if constrained and sequence.sequence_id % 2 else None
        tokens.append(HistoryExecutor.next_token(tokens, sampling, mask))
        if tokens[-1] in sampling.end_token_ids and len(tokens) - sequence.prompt_len > sampling.min_tokens:
            break
    return tokens[start:]


def check_published(rig: Rig) -> None:
    """Asserts that every published block holds what it is said to hold."""
    size, store = rig.blocks.block_size, rig.executor.store
    for node in rig.tree.nodes.values():
        for block in node.copies:
            held = store[block * size : (block + 1) * size]
            assert held == np.frombuffer(node.packed, "<u4").tolist(), "a block is not what was published"


class Life:
    """A scheduler from its start until nothing is left, with random events between its steps."""

    def __init__(self, seed: int, *, proposes: bool = True) -> None:
        self.draw = draw = random.Random(seed)
        pick = draw.choice
        self.rig = rig = Rig(
            num_blocks=draw.randint(2, 24),
            block_size=draw.randint(1, 5),
            max_step_tokens=draw.randint(1, 32),
            max_running=draw.randint(1, 6),
            run_ahead=draw.randint(0, 2),
            admission=pick([*AdmissionRule]),
            interactive_reserve=pick([0.0, 0.0, 0.2, 0.5]),
            aging_s=pick([3.0, 30.0]),
            aged_tokens=pick([3, 256]),
            itl_target_s=pick([0.0, 0.5]),
            batching=pick([Batching.CONTINUOUS] * 5 + [Batching.STATIC_UNPADDED]),
            batch_size=draw.randint(1, 5),
        )
        self.is_masked = draw.random() < 0.4
        if self.is_masked:
            rig.scheduler.masker = Climbing(VOCAB, late=pick([0.0, 0.3]))
        self.proposer = RandomProposer(self._continuation, VOCAB, seed)
        if proposes:
            rig.scheduler.runs.proposer = self.proposer
        self.aborted: set[int] = set()
        self.counts: Counter[str] = Counter()

    def _continuation(self, sequence: Sequence) -> list[int]:
        return continuation(sequence.token_ids, sequence, constrained=self.is_masked)

    def run(self) -> None:
        draw, rig = self.draw, self.rig
        for _ in range(draw.randint(1, 25)):
            event = draw.random()
            if event < 0.4:
                self._submit()
            elif event < 0.5 and rig.sequences:
                sequence_id = draw.randint(1, len(rig.sequences))
                if rig.abort(sequence_id):
                    self.aborted.add(sequence_id)
            else:
                self._steps(draw.randint(1, 6))
            rig.scheduler.check_integrity()
        self._steps(20_000)
        self._check()

    def _steps(self, count: int) -> None:
        rig = self.rig
        for _ in range(count):
            if not rig.scheduler.has_work and not rig.in_flight:
                break
            rig.step()
            rig.scheduler.check_integrity()
            check_published(rig)

    def _submit(self) -> None:
        draw, rig = self.draw, self.rig
        prompt = [draw.randint(0, 1) for _ in range(draw.randint(1, 20))]
        if len(prompt) >= rig.blocks.num_blocks * rig.blocks.block_size:
            return
        options: dict[str, Any] = {
            "lane": draw.choice([*Lane]),
            "tenant": draw.choice("ab"),
            "seed": draw.randrange(3),
            "logprobs": draw.choice([None, 0]),
            "prompt_logprobs": draw.choice([None, None, 0]),
        }
        if draw.random() < 0.4:
            options |= {"end_token_ids": frozenset(range(12)), "min_tokens": draw.choice([0, 3])}
        rig.submit(prompt, draw.randint(1, 24), **options)

    def _check(self) -> None:
        rig = self.rig
        assert set(rig.finished) | self.aborted == set(rig.sequences), "every sequence ends"
        assert rig.blocks.num_live == 0
        for sequence_id, sequence in rig.sequences.items():
            prompt, output = sequence.token_ids[: sequence.prompt_len], rig.outputs[sequence_id]
            expected = continuation(prompt, sequence, constrained=self.is_masked)
            assert output == expected[: len(output)]
            if sequence_id in rig.finished:
                assert len(output) == len(expected)
                stopped = rig.finished[sequence_id] is Finish.STOP
                assert stopped == (
                    output[-1] in sequence.sampling.end_token_ids and len(output) > sequence.sampling.min_tokens
                )
            wanted = sequence.sampling.prompt_logprobs is not None
            scored_prompt = [PositionLogprobs(token, 0.0, 1, []) for token in prompt[1:]] if wanted else None
            assert rig.prompt_logprobs.get(sequence_id, scored_prompt) == scored_prompt
            tokens = prompt + output
            scored = range(len(prompt), len(tokens)) if sequence.sampling.logprobs is not None else ()
            assert rig.logprobs.get(sequence_id, []) == [
                PositionLogprobs(tokens[at], HistoryExecutor.logprob(tokens, at), 1, []) for at in scored
            ]
        num_tokens = sum(map(len, rig.outputs.values()))
        assert rig.stats.output_tokens == num_tokens, "no rejected draft counts"
        accounts = [account for lane in rig.scheduler.waiting.lanes for account in lane]
        assert sum(account.output_tokens for account in accounts) <= num_tokens
        self.counts.update(
            lives=1,
            preempted=rig.stats.preemptions,
            aborted=len(self.aborted),
            cached=sum(rig.cached.values()),
            runs=sum(len(plan.runs) for plan in rig.plans),
            stopped=list(rig.finished.values()).count(Finish.STOP),
            **self.proposer.proposed,
        )
        if self.is_masked:
            assert isinstance(rig.scheduler.masker, Climbing)
            self.counts.update(late=rig.scheduler.masker.num_late)


def lives(seeds: range) -> Counter[str]:
    counts: Counter[str] = Counter()
    for seed in seeds:
        life = Life(seed)
        try:
            life.run()
        except BaseException as error:
            error.add_note(f"the life of seed {seed}")
            raise
        counts += life.counts
    return counts


def test_hundreds_of_lives() -> None:
    counts = lives(range(300))
    for kind in ("preempted", "aborted", "cached", "runs", "stopped", "right", "forced", "wrong", "late"):
        assert counts[kind] > 100, (kind, counts)


@pytest.mark.slow
def test_a_thousand_lives() -> None:
    assert lives(range(1000, 2000))["lives"] == 1000


class Scripted:
    """Proposes what a script has next for each sequence: forced tokens, drafts."""

    def __init__(self, forced: list[int], drafts: list[int] | None = None, *, quiet: int = 0) -> None:
        """quiet: output tokens before the first run"""
        self._forced, self._all, self._quiet = forced, [*forced, *(drafts or [])], quiet

    def follows(self, sequence: Sequence) -> bool:
        return True

    def holds(self, sequence: Sequence) -> bool:
        return sequence.num_pending > 0

    def propose(self, sequence: Sequence, most: int) -> Run | None:
        at = sequence.num_output
        return None if at < self._quiet else Run.of(self._all[at:], max(0, len(self._forced) - at))


@pytest.mark.parametrize("run_ahead", [0, 1])
@pytest.mark.parametrize("room", [1, 2, 4, 64])
def test_forced_tokens_are_taken_as_they_are_whatever_room_a_step_has(room: int, run_ahead: int) -> None:
    rig = Rig(max_step_tokens=room, run_ahead=run_ahead)
    forced = [7, 9, 9, 3, 41]
    rig.scheduler.runs.proposer = Scripted(forced)
    rig.submit([1, 2, 3], 12, logprobs=0)
    rig.run()
    expected = [*forced, *continuation([1, 2, 3, *forced], rig.sequences[1], constrained=False)]
    assert rig.outputs[1] == expected
    assert [entry.token_id for entry in rig.logprobs[1]] == expected
    if room == 64:
        assert rig.plans[0].steps[0].num_new == 3 + 5, "together with the prompt"
        assert len(rig.plans) == 1 + 12 - 6


@pytest.mark.parametrize("most", range(1, 7))
def test_forced_tokens_end_with_a_stop_token_or_with_max_tokens(most: int) -> None:
    rig = Rig()
    rig.scheduler.runs.proposer = Scripted([7, 8, 45, 9, 7, 8])
    rig.submit([1, 2], most, end_token_ids=frozenset({45}), min_tokens=0)
    rig.submit([1, 2], 6, end_token_ids=frozenset({45}), min_tokens=3)
    rig.run()
    assert rig.outputs == {1: [7, 8, 45][:most], 2: [7, 8, 45, 9, 7, 8]}
    assert rig.finished == {1: Finish.STOP if most > 2 else Finish.LENGTH, 2: Finish.LENGTH}


def test_a_run_takes_a_step_of_its_own_pace() -> None:
    """Right drafts save steps whether the engine runs ahead or not, and their tokens count as decodes."""
    right = continuation([1, 2], sequence_like(Rig(), [1, 2], 24), constrained=False)
    for run_ahead in (0, 1):
        rig = Rig(run_ahead=run_ahead)
        rig.scheduler.runs.proposer = Scripted([], [*right[:23]], quiet=2)
        rig.submit([1, 2], 24)
        rig.run()
        assert rig.outputs[1] == right
        assert len(rig.plans) < 8, "a step holds as many as sequences could run"
        assert sum(plan.num_decode_tokens for plan in rig.plans) == sum(plan.num_tokens for plan in rig.plans) - 2
        lane = rig.stats.lanes[Lane.STANDARD]
        assert (lane.output_tokens, lane.itl.count) == (24, len(rig.plans) - 1)


def sequence_like(rig: Rig, prompt: list[int], max_tokens: int) -> Sequence:
    return rig.sequences[rig.submit(prompt, max_tokens)]


def test_a_promise_that_was_reached_is_not_made_again_when_drafts_are_not_taken() -> None:
    rig = Rig()
    sequence = sequence_like(rig, [1, 2, 3], 20)
    rig.step()
    rig.scheduler.runs.proposer = Scripted([], [50, 50, 50, 50])
    sequence.promised_len = 5
    assert sequence.is_aged
    scheduled = rig.schedule()
    assert scheduled is not None
    assert not sequence.is_aged, "it has been given what it was promised"
    rig.commit(*scheduled)
    assert sequence.num_scheduled < 5
    assert not sequence.is_aged


@pytest.mark.parametrize("num_forced", range(5))
@pytest.mark.parametrize("num_drafts", range(4))
def test_what_a_step_takes_of_a_run(num_forced: int, num_drafts: int) -> None:
    tokens = list(range(10, 10 + num_forced + num_drafts))
    run = Run.of(tokens, num_forced)
    for most in range(8):
        part = run.first(most)
        if not tokens or (not num_forced and not most):
            assert part is None
            continue
        assert part is not None
        assert part.num_new == min(most, len(tokens))
        assert part.num_forced == min(num_forced, most + 1)
        assert list(part.token_ids) == tokens[: max(most, part.num_forced)]
        assert part.first(most) == part
        drafts = list(part.token_ids[part.num_forced :])
        assert part.num_samples == (0 if part.num_new < len(part.token_ids) else len(drafts) + 1)
        if part.num_samples:
            for right in range(len(drafts) + 1):
                sampled = [*drafts[:right], *[1] * (len(drafts) + 1 - right)]
                assert part.taken(sampled) == [*part.token_ids[: part.num_forced], *drafts[:right], 1]
            assert part.taken([None] * part.num_samples)[-1] is None
        else:
            assert part.taken([]) == list(part.token_ids)

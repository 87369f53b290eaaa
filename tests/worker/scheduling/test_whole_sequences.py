"""A sequence without output tokens is a sequence like others: it ends with its prompt, and has one whole output."""

from random import Random

import pytest

from tests.worker.fake_executor import HistoryExecutor
from tests.worker.rig import Rig
from trunkline_worker.cache.sequence import Finish
from trunkline_worker.engine.messages import sequence_output
from trunkline_worker.scheduler.sequence_table import Chunk, StepOutput
from trunkline_worker.step.lanes import Lane

PREFIX = [7] * 8


@pytest.mark.parametrize("run_ahead", [0, 1])
@pytest.mark.parametrize("room", [3, 64])
def test_it_ends_with_the_last_token_of_its_prompt_in_however_many_chunks(room: int, run_ahead: int) -> None:
    rig = Rig(max_step_tokens=room, run_ahead=run_ahead)
    prompt = list(range(10))
    whole = rig.submit(prompt, 0)
    rig.run()
    assert rig.wholes == {whole: HistoryExecutor.whole(prompt)}
    assert (rig.outputs[whole], rig.finished[whole], rig.cached[whole]) == ([], Finish.STOP, 0)
    assert rig.tokens_computed == len(prompt)
    assert rig.blocks.num_live == 0
    again = rig.submit(prompt, 0)
    rig.run()
    assert (rig.wholes[again], rig.cached[again]) == (rig.wholes[whole], 8)
    counts = rig.stats.lanes[Lane.STANDARD]
    assert (counts.finished, counts.output_tokens, counts.ttft.count, counts.itl.count) == (2, 0, 2, 0)
    account = rig.sequences[again].account
    assert (account.input_tokens, account.cached_tokens, account.output_tokens) == (12, 8, 0)


def test_its_last_chunk_is_told_like_others_and_is_no_recomputed_one() -> None:
    rig = Rig(max_step_tokens=6)
    whole = rig.submit(list(range(10)), 0)
    chunks = []
    while rig.scheduler.has_work:
        rig.step()
        chunks += rig.committed.chunks
    assert chunks == [Chunk(whole, 6, 0), Chunk(whole, 4, 0)]


@pytest.mark.parametrize("seed", range(150))
def test_among_others_each_has_the_output_that_it_would_have_alone(seed: int) -> None:
    draw = Random(seed)
    rig = Rig(
        num_blocks=draw.randrange(12, 40), max_step_tokens=draw.choice((4, 16, 64)), run_ahead=draw.choice((0, 1))
    )
    prompts: dict[int, list[int]] = {}
    aborted: set[int] = set()
    for _ in range(60):
        if draw.random() < 0.5:
            prompt = PREFIX[: draw.randrange(9)] + [draw.randrange(50) for _ in range(draw.randrange(1, 12))]
            most = 0 if draw.random() < 0.5 else draw.randrange(1, 12)
            lane = draw.choice(list(Lane))
            prompts[rig.submit(prompt, most, lane=lane, tenant=draw.choice("ab"))] = prompt
        if prompts and draw.random() < 0.1:
            victim = draw.choice(list(prompts))
            if rig.abort(victim):
                aborted.add(victim)
        if rig.can_step:
            rig.step()
    rig.run()
    assert rig.blocks.num_live == 0
    assert rig.finished.keys() == prompts.keys() - aborted
    for sequence_id in rig.finished:
        sequence, prompt = rig.sequences[sequence_id], prompts[sequence_id]
        if sequence.sampling.max_tokens:
            assert sequence_id not in rig.wholes
            tokens = list(prompt)
            for token_id in rig.outputs[sequence_id]:
                assert token_id == HistoryExecutor.next_token(tokens, sequence.sampling)
                tokens.append(token_id)
        else:
            assert rig.wholes[sequence_id] == HistoryExecutor.whole(prompt)
            assert rig.outputs[sequence_id] == []


def test_the_front_is_told_all_of_its_values() -> None:
    output = sequence_output(StepOutput(7, whole=[0.5, -1.25], finish=Finish.STOP))
    assert (output.handle, list(output.values), list(output.token_ids)) == (7, [0.5, -1.25], [])
    assert not sequence_output(StepOutput(7, [1])).values

"""Where prompts are indivisible, as encoders need it, each is computed in one step, whatever its length."""

from random import Random

import pytest

from tests.worker.fake_executor import HistoryExecutor
from tests.worker.rig import Rig
from trunkline_worker.step.lanes import Lane

ROOM = 64
LONGEST = 200


def rig_of(**options: object) -> Rig:
    """A block holds any prompt, and none is ever full: see pooled_assembly.py."""
    settings = {"num_blocks": 16, "block_size": LONGEST + 1, "max_step_tokens": ROOM, "indivisible": True, **options}
    return Rig(**settings)  # type: ignore[arg-type]


def lengths_of_steps(rig: Rig) -> list[list[int]]:
    return [[step.num_new for step in plan.steps] for plan in rig.plans]


def test_prompts_share_a_step_as_long_as_they_fit_in_whole() -> None:
    rig = rig_of()
    for length in (30, 30, 30, 4):
        rig.submit([1] * length, 0)
    rig.run()
    assert lengths_of_steps(rig) == [[30, 30], [30, 4]]


def test_one_that_is_longer_than_a_step_has_one_of_its_own_and_is_not_overtaken_for_ever() -> None:
    rig = rig_of()
    for length in (10, LONGEST, 10, ROOM + 1, 10):
        rig.submit([1] * length, 0)
    rig.run()
    assert lengths_of_steps(rig) == [[10], [LONGEST], [10], [ROOM + 1], [10]]


@pytest.mark.parametrize("seed", range(100))
def test_each_is_computed_as_a_whole_whatever_else_there_is(seed: int) -> None:
    draw = Random(seed)
    rig = rig_of(
        run_ahead=draw.choice((0, 1)),
        max_running=draw.choice((1, 8)),
        itl_target_s=draw.choice((0.0, 0.5, 4.0)),
        interactive_reserve=draw.choice((0.0, 0.5)),
        aging_s=draw.choice((2.0, 60.0)),
    )
    prompts: dict[int, list[int]] = {}
    for _ in range(80):
        if draw.random() < 0.6:
            length = draw.choice((1, 5, 20, ROOM, ROOM + 1, draw.randrange(1, LONGEST)))
            prompt = [draw.randrange(50) for _ in range(length)]
            prompts[rig.submit(prompt, 0, lane=draw.choice(list(Lane)), tenant=draw.choice("ab"))] = prompt
        if draw.random() < 0.1 and prompts and rig.abort(victim := draw.choice(list(prompts))):
            del prompts[victim]
        if rig.can_step:
            rig.step()
    rig.run()
    assert rig.blocks.num_live == 0
    assert rig.wholes == {sequence_id: HistoryExecutor.whole(prompt) for sequence_id, prompt in prompts.items()}
    computed = [step for plan in rig.plans for step in plan.steps]
    assert all(step.samples and step.num_computed == 0 for step in computed)
    assert {*prompts} <= {step.sequence_id for step in computed}
    # One that was preempted while its step was in flight is computed again.
    assert len({(step.sequence_id, step.generation) for step in computed}) == len(computed)
    assert rig.run_ahead or not any(step.generation for step in computed)
    assert not any(rig.cached.values()), "nothing is cached"
    for steps in lengths_of_steps(rig):
        assert sum(steps) <= ROOM or len(steps) == 1

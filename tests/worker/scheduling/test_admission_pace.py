"""A queue of long prompts under a target time: no sequence takes a place before there is time to compute for it."""

from math import inf

import pytest

from tests.parameters import one_in
from tests.worker.rig import Rig
from trunkline_kernels.routing_rule import RoutingRule
from trunkline_worker.scheduler.step_cost import STEPS_PER_FIT, Experience, Size, StepLoad

PROMPT_TOKENS = 1000


def rig_with(token_s: float, *, itl_target_s: float = 0.1) -> Rig:
    """A rig with steps of at most 100 ms, of which 10 are fixed: room for some 800 tokens."""
    rig = Rig(
        num_blocks=1 << 16, block_size=16, max_step_tokens=4096, max_running=256, itl_target_s=itl_target_s,
        max_waiting_requests=1024, max_waiting_tokens=1 << 20,
    )  # fmt: skip
    cost = rig.scheduler.cost
    cost._seen, cost.fixed_s, cost.token_s = STEPS_PER_FIT, 0.010, token_s
    cost.experience = Experience(trusted=Size(inf, inf, inf))
    return rig


# Some of them leave a rest of a step's time that is too short for a chunk, but not 0.
@pytest.mark.parametrize("token_s", one_in(3, [token * 1e-6 for token in (60, 87, 100, 104, 113, 121, 137)]))
def test_a_tenants_queue_of_prompts_does_not_go_before_a_newcomer(token_s: float) -> None:
    rig = rig_with(token_s)
    for n in range(128):
        rig.submit([n] * PROMPT_TOKENS, 8, tenant="crowd")
    for _ in range(12):
        rig.step()
        untouched = [sequence for sequence in rig.scheduler.running if not sequence.num_scheduled]
        assert not untouched, "a place and blocks are held for nothing"
    newcomer = rig.submit([200], 1, tenant="newcomer")
    steps = 0
    while newcomer not in rig.finished:
        rig.step()
        steps += 1
    assert steps <= 3, "one step may be full, and two prompts may have been begun"


def decoding_beside(experts_s: float, itl_target_s: float) -> tuple[int, float]:
    """How many of 128 sequences decode at once on a device that takes so long to read all experts, and the time of such
    a step."""
    rig = rig_with(1e-4, itl_target_s=itl_target_s)
    cost = rig.scheduler.cost
    cost.routing, cost.experts_s = RoutingRule(128, 8), experts_s
    for n in range(128):
        rig.submit([n, n], 400)
    rig.step()  # after this second, the others have waited for so long that they may stretch steps
    count = len(rig.scheduler.running)
    return count, cost.time_s(StepLoad(count, 0, 0.0))


def test_sequences_that_use_all_experts_are_admitted_if_steps_then_meet_their_target() -> None:
    count, step_s = decoding_beside(experts_s=0.05, itl_target_s=0.1)
    assert count == 128
    assert step_s < 0.1


def test_fewer_sequences_run_if_reading_all_experts_would_miss_the_target() -> None:
    count, step_s = decoding_beside(experts_s=0.1, itl_target_s=0.08)
    assert 4 < count < 30
    assert 0.03 < step_s < 0.08

"""A queue of long prompts under a target time: no sequence takes a place before there is time to compute for it."""

from math import inf

import pytest

from tests.parameters import one_in
from tests.worker.rig import Rig
from trunkline_worker.scheduler.step_cost import STEPS_PER_FIT, Experience, Size

PROMPT_TOKENS = 1000


def rig_with(token_s: float) -> Rig:
    """A rig with steps of at most 100 ms, of which 10 are fixed: room for some 800 tokens."""
    rig = Rig(
        num_blocks=1 << 16, block_size=16, max_step_tokens=4096, max_running=256, itl_target_s=0.1,
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

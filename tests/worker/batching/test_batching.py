"""Static and dynamic batching, which are there to be compared with continuous batching."""

from tests.worker.rig import Rig
from trunkline_worker.scheduler.limits import Batching


def test_static_batches_keep_their_members_and_count_their_padding() -> None:
    rig = Rig(max_running=8, batching=Batching.STATIC, batch_size=2)
    for length, output in ((3, 2), (7, 5), (2, 2)):
        rig.submit([length] * length, output)
    rig.run()
    assert [len(plan.starts) for plan in rig.plans if plan.starts] == [2, 1], "the third waits for the batch to end"
    padding = [plan.num_padding for plan in rig.plans]
    assert padding[0] == 4, "the shorter prompt is padded to the longer one"
    assert sum(padding[1:5]) == 3, "the ended member's row is computed until the batch is over"


def test_dynamic_batches_wait_to_fill_but_not_beyond_their_window() -> None:
    rig = Rig(max_running=8, batching=Batching.DYNAMIC, batch_size=2, batch_window_s=10.0)
    rig.submit([1], 2)
    assert rig.schedule() is None
    assert rig.scheduler.wakes_s() == 10.0
    rig.now_s = 10.0
    rig.run()
    assert len(rig.finished) == 1


def test_a_static_batch_does_not_wait_for_a_sequence_that_waits_for_a_members_prefix() -> None:
    rig = Rig(num_blocks=8, block_size=1, max_step_tokens=1, max_running=1, batching=Batching.STATIC, batch_size=2)
    for prompt in ([1, 0], [1, 0, 5, 6]):
        rig.submit(prompt, max_tokens=1)
    rig.run()
    assert len(rig.finished) == 2

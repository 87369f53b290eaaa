"""The order of waiting sequences."""

from tests.worker.rig import Rig


def test_within_a_tenant_the_earliest_deadline_goes_first() -> None:
    rig = Rig(max_running=1)
    rig.submit([1], 2)
    rig.step()
    late, early, none = (rig.submit([n], 2, within_s=s) for n, s in ((2, 50.0), (3, 20.0), (4, None)))
    rig.run()
    order = [start.sequence_id for plan in rig.plans for start in plan.starts]
    assert order.index(early) < order.index(late) < order.index(none)

"""Equal tenants get equal service of the whole fleet, also where each worker could be fair and the fleet not."""

from dataclasses import dataclass

import pytest

from trunkline_bench.reports.statistics import jain
from trunkline_router.quotas.fairness import (
    CACHED_COST,
    HALF_LIFE_MS,
    INPUT_COST,
    OUTPUT_COST,
    decayed,
    weight_factor,
)
from trunkline_router.quotas.reservation import Reservation

CAPACITY = 10_000.0  # cost units per second and worker


def service(usable: dict[str, tuple[int, ...]], *, corrected: bool, seconds: int = 120) -> dict[str, float]:
    """What always hungry tenants of weight 1 get in the second half, each worker being fair by weight among those that
    use it. Tenants by the workers that they can use."""
    served = dict.fromkeys(usable, 0.0)
    got = dict.fromkeys(usable, 0.0)
    for second in range(seconds):
        weights = {name: weight_factor(name, served, usable) if corrected else 1.0 for name in usable}
        for name, workers in usable.items():
            rate = sum(
                CAPACITY * weights[name] / sum(weights[other] for other in usable if worker in usable[other])
                for worker in workers
            )
            served[name] = decayed(served[name], 1000, HALF_LIFE_MS) + rate
            got[name] += rate if second >= seconds // 2 else 0.0
    return got


@dataclass(frozen=True)
class Progress:
    """Of a request that a worker computes."""

    is_owed: bool = True
    has_ended: bool = False


def test_tenants_that_use_the_same_workers_are_left_alone() -> None:
    got = service({"a": (0, 1), "b": (0, 1)}, corrected=True)
    assert got["a"] == got["b"]


@pytest.mark.parametrize(
    "usable",
    [{"a": (0, 1), "b": (0,)}, {"a": (0, 1, 2, 3), "b": (0, 1)}, {"a": (0, 1, 2), "b": (0, 1, 2), "c": (2,)}],
)
def test_a_tenant_that_can_use_fewer_workers_gets_its_share_all_the_same(usable: dict[str, tuple[int, ...]]) -> None:
    assert jain(service(usable, corrected=False).values()) < 0.91
    assert jain(service(usable, corrected=True).values()) >= 0.95


def test_nobody_loses_capacity_by_the_correction() -> None:
    usable = {"a": (0, 1), "b": (0,)}
    assert sum(service(usable, corrected=True).values()) == pytest.approx(
        sum(service(usable, corrected=False).values())
    )


def test_a_correction_is_bounded_and_needs_a_rival_and_some_service() -> None:
    assert weight_factor("a", {"a": 1e9}, ["a"]) == 1.0
    assert weight_factor("a", {"a": 1e9, "b": 5e3}, ["a"]) == 1.0, "b has nothing to do"
    assert weight_factor("a", {"a": 1e9, "b": 5e3}, ["a", "b"]) == 0.25
    assert weight_factor("b", {"a": 1e9, "b": 5e3}, ["a", "b"]) == 4.0
    assert weight_factor("b", {"a": 900.0, "b": 10.0}, ["a", "b"]) == 1.0, "one request's difference"


def test_service_is_half_forgotten_after_a_half_life() -> None:
    assert decayed(8.0, 60_000, 60_000) == 4.0
    assert decayed(8.0, -5, 60_000) == 8.0


def test_inputs_count_as_they_are_answered_and_in_the_end_those_at_the_worker() -> None:
    served: list[float] = []
    with Reservation("t", 1.0, 100, None, lambda ended: served.append(ended.new_service())) as reservation:
        reservation.follow(Progress())
        inputs = reservation.meter.inputs
        for index in range(3):
            inputs.sent(index, 10)
        inputs.answered(1, 10, 5)
        assert reservation.new_service() == 5 * INPUT_COST + 5 * CACHED_COST
        assert reservation.new_service() == 0.0
        assert reservation.used_tokens == 30, "of 100"
    assert served == [20 * INPUT_COST]


def test_an_answer_that_is_not_seen_counts_once_as_the_longest_that_it_can_be() -> None:
    served: list[float] = []
    with Reservation("t", 1.0, 10, None, lambda ended: served.append(ended.new_service())) as reservation:
        for _ in range(2):  # granted again after a loss
            reservation.charge_in_full(10, 20)
    assert served == [10 * INPUT_COST + 20 * OUTPUT_COST]

"""Whatever clients send, the number of series and the memory are bounded."""

import gc
import tracemalloc
from collections import Counter

import pytest

from tests.router.metrics.records import answered, attempt, counts, refused, values
from trunkline.status import NO_WORKER
from trunkline_router.observe.metrics.attempt_metrics import MAX_WORKERS
from trunkline_router.observe.metrics.request_metrics import RequestCounts

MOST_SERIES = 1000
LANES = ("interactive", "standard", "batch")


def series(counted: RequestCounts) -> Counter[str]:
    """How many each family has."""
    return Counter({family.name: len(family.samples) for family in counted.families()})


def test_ten_thousand_tenants_cost_at_most_a_thousand_series_a_metric() -> None:
    counted = counts("late but listed")
    for n in range(10_000):
        tenant, lane = f"tenant-{n}", LANES[n % 3]
        told = answered(tenant=tenant, lane=lane) if n % 2 else refused(NO_WORKER, tenant=tenant, lane=lane)
        counted.request_ended(told)
    counted.request_ended(answered(tenant="late but listed"))
    assert max(series(counted).values()) <= MOST_SERIES
    requests = values(counted.families, "trunkline_router_tenant_requests_total", "tenant")
    assert sum(requests.values()) == 10_001, "the others are folded, not lost"
    assert requests["late but listed",] == 1, "invented names do not displace listed tenants"


def test_values_that_clients_choose_do_not_become_labels_without_bound() -> None:
    counted = counts()
    for n in range(3000):
        record = answered(model=f"model-{n}", endpoint=f"/v1/{n}", outcome=f"outcome {n}", lane=LANES[n % 3])
        counted.request_ended(record)
    for name, number in series(counted).items():
        assert number <= 256 * 19, f"{name}: as many models as there may be, and as many phases"
    assert len(values(counted.families, "trunkline_router_requests_total", "model_name")) == 33


def test_workers_that_come_and_go_are_forgotten() -> None:
    counted = counts()
    for n in range(2 * MAX_WORKERS):
        told = answered()
        told.attempts[0] = attempt()
        told.attempts[0].worker = f"pod-{n}"
        counted.request_ended(told)
    found = values(counted.families, "trunkline_router_worker_attempts_total", "worker")
    assert len(found) == MAX_WORKERS
    assert (f"pod-{2 * MAX_WORKERS - 1}",) in found


@pytest.mark.slow
@pytest.mark.slow
def test_two_hours_of_traffic_leave_the_memory_flat() -> None:
    counted = counts()

    def serve(minutes: int) -> None:
        for n in range(60 * minutes):
            counted.request_ended(answered(tenant=f"tenant-{n % 300}", trace_id=n, request_id=f"request-{n}"))

    serve(10)
    gc.collect()
    tracemalloc.start()
    serve(120)
    gc.collect()
    grown, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert grown < 50_000, "bytes; a number kept per request would be a quarter of a megabyte"

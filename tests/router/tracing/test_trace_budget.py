"""How many requests are exported is bounded, and a tenant that floods the router costs the others no traces."""

from collections import Counter
from collections.abc import Callable, Sequence

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan

from tests.router.metrics.records import answered
from trunkline_router.tracing.request_traces import RequestTraces
from trunkline_router.tracing.trace_budget import AT_ONCE, MOST_TENANTS, PER_S, RESERVE, TENANT_PER_S, TraceBudget


class Exports:
    """Counts what it is given."""

    def __init__(self) -> None:
        self.num_put = self.num_withheld = 0

    def put(self, _: Callable[[], Sequence[ReadableSpan]]) -> bool:
        self.num_put += 1
        return True

    def withhold(self) -> None:
        self.num_withheld += 1


def test_a_flood_of_requests_that_their_clients_sample_is_withheld_and_counted() -> None:
    exports = Exports()
    traces = RequestTraces(exports, Resource.create(), slow_s=None, clock_s=lambda: 0.0)
    flood = [answered(is_sampled=True, is_exported=False) for _ in range(1000)]
    for record in flood:
        traces.request_ended(record)
    assert AT_ONCE - RESERVE <= exports.num_put < AT_ONCE
    assert exports.num_put + exports.num_withheld == len(flood)
    assert sum(record.is_exported for record in flood) == exports.num_put


def taken_in(seconds: int, budget: TraceBudget, tenants: Sequence[str], per_s: int) -> Counter[str]:
    """What is taken of the budget if each tenant has so many requests a second."""
    taken: Counter[str] = Counter()
    for step in range(seconds * per_s):
        for tenant in tenants:
            taken[tenant] += budget.takes(tenant, step / per_s)
    return taken


def test_one_tenant_alone_has_the_whole_rate() -> None:
    taken = taken_in(60, TraceBudget(0.0), ["only"], per_s=1000)
    assert 0.9 * 60 * PER_S < taken["only"] < 60 * PER_S + AT_ONCE


def test_a_tenant_with_few_requests_is_not_crowded_out() -> None:
    budget = TraceBudget(0.0)
    taken_in(60, budget, ["flood"], per_s=1000)
    quiet = 0
    for step in range(10_000):
        now_s = 60.0 + step / 1000
        budget.takes("flood", now_s)
        if step % 100 == 0:
            quiet += budget.takes("quiet", now_s)
    assert quiet == 100, f"10 requests a second are fewer than {TENANT_PER_S}"


def test_it_remembers_a_bounded_number_of_tenants() -> None:
    budget = TraceBudget(0.0)
    for number in range(10 * MOST_TENANTS):
        budget.takes(f"tenant-{number}", number / 1e3)
    assert len(budget._tenants) <= MOST_TENANTS

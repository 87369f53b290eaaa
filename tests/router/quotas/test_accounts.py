"""Names that anybody may invent, also while the store is lost: what each costs, and what becomes of those that are too
many."""

import asyncio
from random import Random

from tests.router.shared_state_rig import Clock, FakeFleet, use
from tests.router.virtual_time import virtual_time
from trunkline_router.quotas.admission import RequestUse
from trunkline_router.quotas.fairness import MAX_TENANTS, Served
from trunkline_router.quotas.quota import Quotas, RateLimit
from trunkline_router.quotas.redis_store import RedisStore
from trunkline_router.quotas.shared_state import SharedState
from trunkline_router.quotas.store import Answer, Ask, Report, StoreDown, SyncReply
from trunkline_router.quotas.tenant_book import MAX_ACCOUNTS, SHARED_ACCOUNT, QuotaBook

RATE = Quotas(requests_per_minute=600)


class LostStore(RedisStore):
    """A store that cannot be reached."""

    def __init__(self) -> None:
        pass

    def reserve(self, ask: Ask) -> "asyncio.Future[Answer | None]":
        raise AssertionError("a lost store is not asked")

    async def sync(self, report: Report) -> SyncReply:
        raise StoreDown("lost")

    async def connect(self) -> None:
        raise StoreDown("lost")

    async def close(self) -> None:
        pass


def test_so_many_unlisted_tenants_have_accounts_of_their_own_and_the_others_share_one() -> None:
    book = QuotaBook(60_000, max_accounts=2)
    assert [admitted(book, name, 0.0) for name in ("a", "b", "c", "a", "d")] == ["a", "b", "*", "a", "*"]
    assert book.account("acme", is_listed=True) == "acme"


def test_an_account_is_free_again_when_nothing_of_its_tenant_counts_any_more() -> None:
    book = QuotaBook(60_000, max_accounts=2)
    admitted(book, "a", 0.0)
    admitted(book, "b", 50_000.0)
    assert book.account("c", is_listed=False) == SHARED_ACCOUNT
    assert admitted(book, "c", 60_501.0) == "c"
    assert admitted(book, "b", 70_000.0) == "b"
    assert admitted(book, "a", 70_000.0) == SHARED_ACCOUNT


def admitted(book: QuotaBook, tenant: str, now_ms: float) -> str:
    """The account on which a request is counted that ends at once."""
    book.next_report(now_ms, is_beat=True)
    book.forget_idle(now_ms)
    account = book.account(tenant, is_listed=False)
    book.tenant(account).admit(1, now_ms)
    book.tenant(account).in_flight -= 1
    return account


def test_a_router_remembers_the_service_of_a_bounded_number_of_names_those_with_the_most() -> None:
    served = Served()
    served.add("acme", 1e9)
    for number in range(10 * MAX_TENANTS):
        served.add(f"invented-{number}", 100.0)
        if number % 500 == 0:
            served.count_alone(float(number))
    served.count_alone(1.0)
    assert len(served.fleet) <= 2 * MAX_TENANTS
    assert "acme" in served.fleet


def test_service_that_no_store_was_told_of_is_bounded_too() -> None:
    served = Served()
    served.add("acme", 1e9)
    for number in range(10 * MAX_TENANTS):
        served.add(f"invented-{number}", 100.0)
    told = served.changes()
    assert len(told) <= 2 * MAX_TENANTS
    assert told["acme"] == 1e9


def test_telling_what_is_left_keeps_no_account_in_use() -> None:
    clock = Clock()
    state = SharedState(None, "r", FakeFleet(), Random(0), window_ms=60_000, steady_s=clock.steady_s)
    for number in range(MAX_ACCOUNTS):
        assert state.rate_limits(f"invented-{number}", RATE, is_listed=False) == [RateLimit("requests", 600, 600, 0)]
    assert not list(state.tenants_with_use())
    assert state._own.book.account("acme", is_listed=False) == "acme"


@virtual_time
async def test_an_outage_of_the_store_costs_as_much_memory_as_its_last_minute() -> None:
    loop = asyncio.get_running_loop()
    state = SharedState(LostStore(), "r", FakeFleet(), Random(0), window_ms=60_000, steady_s=loop.time)
    await state.start()
    background = asyncio.create_task(state.run())
    for number in range(1200):
        for tenant in ("acme", f"invented-{number}"):
            reservation = await state.reserve(
                tenant, RATE, RequestUse(1, 1, most_tokens=1, choices=1), is_listed=False, weight=1.0
            )
            use(reservation, 1, 1)
        await asyncio.sleep(1.0)
    background.cancel()
    names = list(state.tenants_with_use())
    assert "acme" in names
    assert len(names) <= 66, "those of the last minute, and of at most one rest between two attempts"
    changes = state._own.book.next_report(loop.time() * 1e3, is_beat=True)["acme"].changes
    assert sum(change.requests for change in changes) in range(58, 62), "what the store still has to be told"
    assert min(change.at_ms for change in changes) >= loop.time() * 1e3 - 61_000

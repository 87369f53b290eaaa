"""Names that anybody may invent: what each may cost, and what becomes of those that come too many."""

from trunkline_router.quotas.fairness import MAX_TENANTS, Served
from trunkline_router.quotas.tenant_book import SHARED_ACCOUNT, Accounts


def test_so_many_unlisted_tenants_have_accounts_of_their_own_and_the_others_share_one() -> None:
    accounts = Accounts(60_000, max_accounts=2)
    assert [accounts.account(name, 0.0) for name in ("a", "b", "c", "a", "d")] == ["a", "b", "*", "a", "*"]


def test_an_account_is_free_again_when_its_tenant_has_been_silent_for_two_windows() -> None:
    accounts = Accounts(60_000, max_accounts=2)
    accounts.account("a", 0.0)
    accounts.account("b", 100_000.0)
    assert accounts.account("c", 120_000.0) == SHARED_ACCOUNT
    assert accounts.account("c", 120_001.0) == "c"
    assert accounts.account("b", 130_000.0) == "b"
    assert accounts.account("a", 130_000.0) == SHARED_ACCOUNT


def test_a_router_remembers_the_service_of_a_bounded_number_of_names_those_with_the_most() -> None:
    served = Served()
    served.add("acme", 1e9)
    for number in range(10 * MAX_TENANTS):
        served.add(f"invented-{number}", 100.0)
        if number % 500 == 0:
            served.changes(float(number))
    told = served.everything(1.0)
    assert len(told) <= 2 * MAX_TENANTS
    assert "acme" in told

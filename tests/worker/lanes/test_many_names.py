"""Requests sent one by one under many names do not starve another tenant."""

import pytest

from trunkline_worker.step.fair_share import Account, Accounts
from trunkline_worker.step.lanes import Lane

TOKENS = 10


def serve(accounts: Accounts) -> Account:
    """Runs the next request to its end."""
    account = accounts.next()
    assert account is not None
    accounts.step_out(account)
    accounts.leave(account, TOKENS)
    accounts.start(account)
    account.input_tokens += TOKENS
    accounts.stop(account)
    return account


def submit(accounts: Accounts, tenant: str) -> Account:
    account = accounts.account(tenant, 1.0)
    accounts.join(account, TOKENS)
    accounts.line_up(account)
    return account


@pytest.mark.parametrize("again_after", [10**9, 500, 100])
@pytest.mark.parametrize("names", [1, 12, 60])
def test_a_tenant_has_its_turn_beside_names_that_each_send_one_request(names: int, again_after: int) -> None:
    accounts = Accounts(Lane.STANDARD)
    for number in range(names):
        submit(accounts, f"name {number}")
    number, turns, since = names, 0, 0
    innocent = submit(accounts, "innocent")
    while turns < 40:
        served, since = serve(accounts), since + 1
        if served is innocent:
            # Its fair share is one request in (names + 1).
            assert since <= 2 * (names + 1) + 2, f"it had to wait for {since} requests"
            turns, since = turns + 1, 0
            submit(accounts, "innocent")
        else:
            assert since <= 10 * (names + 2), "the tenant never has its turn"
            number += 1
            submit(accounts, f"name {number % again_after}")
    accounts.check_integrity()

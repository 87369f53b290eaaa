"""Requests sent one by one under many names do not starve another tenant."""

import pytest

from trunkline_worker.lanes.fair_share import Account, Accounts
from trunkline_worker.lanes.lanes import Lane

TOKENS = 10


def serve(accounts: Accounts) -> Account:
    """Runs the next request to its end."""
    account = accounts.next()
    assert account is not None
    accounts.leave(account, TOKENS)
    accounts.start(account)
    account.input_tokens += TOKENS
    accounts.stop(account)
    return account


@pytest.mark.parametrize("again_after", [10**9, 500, 100])
@pytest.mark.parametrize("names", [1, 12, 60])
def test_a_tenant_has_its_turn_beside_names_that_each_send_one_request(names: int, again_after: int) -> None:
    accounts = Accounts(Lane.STANDARD)
    innocent = accounts.account("innocent", 1.0)
    for number in range(names):
        accounts.join(accounts.account(f"name {number}", 1.0), TOKENS)
    number, turns, since = names, 0, 0
    accounts.join(innocent, TOKENS)
    while turns < 40:
        served, since = serve(accounts), since + 1
        if served is innocent:
            # Its fair share is one request in (names + 1).
            assert since <= 2 * (names + 1) + 2, f"it had to wait for {since} requests"
            turns, since = turns + 1, 0
            accounts.join(innocent, TOKENS)
        else:
            assert since <= 10 * (names + 2), "the tenant never has its turn"
            number += 1
            accounts.join(accounts.account(f"name {number % again_after}", 1.0), TOKENS)
    accounts.check_integrity()

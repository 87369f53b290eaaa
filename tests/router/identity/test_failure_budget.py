"""Invalid tokens take a bounded share of the event loop's time, by host and in all."""

import pytest

from trunkline.status import RequestRefused
from trunkline_router.access.identity import bearer_token
from trunkline_router.access.identity.bearer_token import (
    BURST_S,
    HOST_BURST_S,
    MOST_HOSTS,
    SHARE_IN_ALL,
    SHARE_OF_HOST,
    FailureBudget,
)
from trunkline_router.address import network_of

COST_S = 0.001
HOST = "ipv4:10.0.0.1"


def is_refused(budget: FailureBudget, host: str, now_s: float) -> int:
    """The milliseconds until a retry makes sense; 0 if the token may be verified."""
    try:
        budget.check(host, now_s)
    except RequestRefused as refused:
        return refused.retry_delay_ms
    return 0


def flood(budget: FailureBudget, seconds: float, *hosts: str, each_s: float = 0.0005) -> dict[str, float]:
    """The time that each host's invalid tokens took, of hosts that send one after another for so long."""
    spent = dict.fromkeys(hosts, 0.0)
    for turn in range(int(seconds / each_s)):
        host = hosts[turn % len(hosts)]
        if not is_refused(budget, host, turn * each_s):
            budget.spend(host, COST_S, turn * each_s)
            spent[host] += COST_S
    return spent


def test_a_host_takes_its_share_and_leaves_room_for_others() -> None:
    budget = FailureBudget()
    spent = flood(budget, 60.0, HOST)
    assert spent[HOST] == pytest.approx(HOST_BURST_S + 60 * SHARE_OF_HOST, abs=2 * COST_S)
    assert is_refused(budget, HOST, 60.0)
    assert not is_refused(budget, "ipv4:10.0.0.2", 60.0)


def test_all_hosts_together_take_a_bounded_share() -> None:
    spent = flood(FailureBudget(), 60.0, *(f"ipv4:10.0.0.{number}" for number in range(100)))
    assert sum(spent.values()) == pytest.approx(BURST_S + 60 * SHARE_IN_ALL, abs=2 * COST_S)


def test_a_refusal_tells_when_a_retry_makes_sense() -> None:
    budget = FailureBudget()
    budget.spend(HOST, 0.105, 0.0)
    retry_ms = is_refused(budget, HOST, 0.0)
    assert retry_ms == pytest.approx(500, abs=5)
    assert not is_refused(budget, HOST, retry_ms / 1e3)
    budget.spend(HOST, COST_S, retry_ms / 1e3)
    assert is_refused(budget, HOST, retry_ms / 1e3) >= 100


def test_a_budget_grows_back_no_further_than_its_burst() -> None:
    budget = FailureBudget()
    budget.spend(HOST, 0.1, 0.0)
    for at_s in (1e6, 1e6):
        budget.spend(HOST, 0.06, at_s)
    assert is_refused(budget, HOST, 1e6)


def test_the_addresses_of_one_ipv6_network_are_one_host() -> None:
    assert network_of("ipv6:[2001:db8::1]") == network_of("ipv6:%5B2001:db8::ffff:2%5D")
    assert network_of("ipv6:[2001:db8::1]") != network_of("ipv6:[2001:db8:0:1::1]")
    assert network_of("ipv6:[fe80::1%25eth0]") == network_of("ipv6:[fe80::2]")
    assert network_of("ipv6:[2001:db8::1]") == network_of("2001:db8::2")
    assert network_of("ipv4:10.0.0.1") != network_of("ipv4:10.0.0.2")
    assert network_of("ipv4:10.0.0.1") == network_of("10.0.0.1") == network_of("::ffff:10.0.0.1")
    assert network_of("::ffff:10.0.0.1") != network_of("::ffff:10.0.0.2")
    for odd in ("", "unix:/tmp/socket", "ipv6:[not an address]"):
        assert network_of(odd) == odd


def test_the_number_of_remembered_hosts_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bearer_token, "SHARE_IN_ALL", 1e9)
    monkeypatch.setattr(bearer_token, "BURST_S", 1e9)
    budget = FailureBudget()
    for number in range(MOST_HOSTS + 10):
        budget.spend(f"ipv4:host-{number}", 1.0, 0.0)
    assert len(budget._hosts) == MOST_HOSTS
    assert is_refused(budget, f"ipv4:host-{MOST_HOSTS}", 0.0)

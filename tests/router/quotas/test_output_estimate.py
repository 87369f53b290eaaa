"""How long an answer without max_tokens is expected to be."""

from random import Random

import pytest

from trunkline_router.quotas.tenant_book import MAX_TENANTS, OutputEstimates

MOST = 32_000
QUOTA = 1_000_000


def test_sixteen_answers_of_an_unknown_tenant_may_be_as_long_as_they_can_be() -> None:
    estimates = OutputEstimates()
    assert estimates.tokens("new", QUOTA, MOST) == MOST, "which sixteen times is within the quota"
    assert estimates.tokens("new", 160_000, MOST) == 10_000
    assert estimates.tokens("new", 100, MOST) == 256
    assert estimates.tokens("new", None, MOST) == 256
    assert estimates.tokens("new", QUOTA, 50) == 50


def test_a_mixture_is_expected_to_be_as_long_as_the_answer_that_a_token_is_in() -> None:
    estimates, draw = OutputEstimates(), Random(1)
    lengths = [draw.choice((10, 10, 10, 1000)) for _ in range(2000)]
    for length in lengths:
        estimates.learn("t", 40_000, length, is_whole=True)
    weighted = sum(length * length for length in lengths) / sum(lengths)
    assert estimates.tokens("t", 40_000, MOST) == pytest.approx(weighted, rel=0.1)


def test_to_talk_an_estimate_down_costs_its_tokens_and_one_long_answer_raises_it() -> None:
    estimates = OutputEstimates()
    quota, spent = QUOTA // 8, 0
    while estimates.tokens("t", quota, MOST) > 100:
        estimates.learn("t", quota, 1, is_whole=True)
        spent += 1
    assert spent > quota
    estimates.learn("t", quota, MOST, is_whole=True)
    assert estimates.tokens("t", quota, MOST) > MOST / 2


def test_an_answer_that_was_broken_off_can_only_raise_the_estimate() -> None:
    estimates = OutputEstimates()
    estimates.learn("t", 4096, 20, is_whole=False)
    assert estimates.tokens("t", 4096, MOST) == 256
    estimates.learn("t", 4096, 2000, is_whole=False)
    assert estimates.tokens("t", 4096, MOST) > 1500


def test_tenants_are_remembered_in_bounded_number_those_with_the_latest_answers() -> None:
    estimates = OutputEstimates()
    for number in range(MAX_TENANTS):
        estimates.learn(str(number), 4096, 5000, is_whole=True)
    estimates.learn("0", 4096, 5000, is_whole=True)
    estimates.learn("another", 4096, 5000, is_whole=True)
    known = [name for name in ("0", "1", "2", "another") if estimates.tokens(name, 4096, MOST) > 256]
    assert known == ["0", "2", "another"]

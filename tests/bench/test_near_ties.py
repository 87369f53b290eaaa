"""Divergence of two runs of a stream: which differences count as near ties, and which never do."""

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from trunkline_bench.faults.near_ties import NEAR, Parting, contradictions, partings
from trunkline_bench.faults.scenarios import RouterLoss
from trunkline_bench.faults.streams import Order, Record
from trunkline_worker.step.sampling_key import choice_seed, position_key, race_noise

GREEDY = Order([3, 4, 5], {"temperature": 0.0, "seed": 1, "logprobs": 2})
TOKENS = [10, 11, 12, 13]
AT = 2  # where the streams diverge
TEMPERATURE = 0.5


def record(token_ids: list[int], *, second: tuple[int, float] = (99, -9.0), finish: str = "length") -> Record:
    """A stream of tokens at -0.5 each; at AT the second most likely token is `second`."""
    seconds = [second if at == AT else (98, -9.0) for at in range(len(token_ids))]
    return Record(
        token_ids={0: token_ids},
        logprobs={0: [(token, -0.5) for token in token_ids]},
        tops={0: [[(token, -0.5), other] for token, other in zip(token_ids, seconds, strict=True)]},
        finish={0: finish},
        usage=(3, len(token_ids)),
    )


def parted(order: Order, got: Record, expected: Record) -> list[Parting]:
    """The divergences of two streams, of which the first one does not diverge."""
    return partings([GREEDY, order], [record(TOKENS), got], [record(TOKENS), expected])


def other_token(token: int) -> list[int]:
    return [*TOKENS[:AT], token, 77]


def test_equal_streams_do_not_diverge() -> None:
    assert parted(GREEDY, record(TOKENS), record(TOKENS, second=(50, -0.5))) == []


@pytest.mark.parametrize(("lead", "near"), [(0.0, True), (0.125, True), (NEAR, True), (NEAR + 0.25, False)])
def test_a_different_token_is_a_near_tie_if_it_was_nearly_as_likely(lead: float, near: bool) -> None:
    (parting,) = parted(GREEDY, record(other_token(50)), record(TOKENS, second=(50, -0.5 - lead)))
    assert parting == Parting(stream=1, choice=0, token_index=AT, gap=lead)
    assert parting.is_near_tie == near


def test_a_token_outside_the_top_ones_is_never_a_near_tie() -> None:
    (parting,) = parted(GREEDY, record(other_token(51)), record(TOKENS, second=(50, -0.5)))
    assert (parting.token_index, parting.gap, parting.is_near_tie) == (AT, None, False)


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "top_p": 1.0}])
def test_a_missing_or_extra_tail_is_not_a_near_tie(options: dict[str, Any]) -> None:
    order = replace(GREEDY, options=GREEDY.options | options)
    whole, short = record(TOKENS, second=(50, -0.5)), record(TOKENS[:AT])
    for got, expected in ((short, whole), (whole, short), (Record(), whole)):
        (parting,) = parted(order, got, expected)
        assert (parting.gap, parting.is_near_tie) == (None, False)
        assert parting.token_index == (AT if got.token_ids else 0)


def noise_of(order: Order, choice: int, *tokens: int) -> list[float]:
    key = position_key(choice_seed(order.options["seed"], choice), len(order.prompt) + AT)
    return list(map(float, race_noise(np.array([key], np.uint64), np.array(tokens))))


def test_the_gap_of_a_sampled_token_includes_the_noise_of_the_draw() -> None:
    order = replace(GREEDY, options=GREEDY.options | {"temperature": TEMPERATURE, "top_p": 1.0})
    mine, theirs = noise_of(order, 0, TOKENS[AT], 50)
    # A log-probability that makes the scores equal but for a tenth.
    level = -0.5 + (mine - theirs - 0.1) * TEMPERATURE
    (parting,) = parted(order, record(other_token(50)), record(TOKENS, second=(50, level)))
    assert parting.gap is not None
    assert math.isclose(parting.gap, 0.1, abs_tol=1e-9)
    (parting,) = parted(order, record(other_token(50)), record(TOKENS, second=(50, level - 1.0)))
    assert not parting.is_near_tie


def test_a_sampled_token_outside_the_top_ones_has_the_log_probability_of_its_own_run() -> None:
    order = replace(GREEDY, options=GREEDY.options | {"temperature": TEMPERATURE, "top_p": 1.0})
    # A token whose noise is large enough to be drawn.
    (mine,) = noise_of(order, 0, TOKENS[AT])
    other, theirs = next((token, it) for token in range(51, 9999) if (it := noise_of(order, 0, token)[0]) > mine + 1)
    for lead, near in ((0.1, True), (3.0, False)):
        got = record(other_token(other))
        got.logprobs[0][AT] = (other, -0.5 + (mine - theirs - lead) * TEMPERATURE)
        least = got.logprobs[0][AT][1] + 0.1  # of the top tokens
        (parting,) = parted(order, got, record(TOKENS, second=(50, least)))
        assert parting.gap is not None
        assert math.isclose(parting.gap, lead, abs_tol=1e-9)
        assert parting.is_near_tie == near
        (wrong,) = parted(order, got, record(TOKENS, second=(50, least - 0.1 - NEAR - 0.1)))
        assert wrong.gap is None, "it should be among the top tokens"


def test_choices_diverge_independently() -> None:
    order = replace(GREEDY, options=GREEDY.options | {"n": 2, "temperature": 1.0, "top_p": 1.0})

    def two(second: list[int]) -> Record:
        one, other = record(TOKENS, second=(50, -0.5)), record(second, second=(50, -0.5))
        for name in ("token_ids", "logprobs", "tops", "finish"):
            getattr(one, name)[1] = getattr(other, name)[0]
        return one

    (parting,) = parted(order, two(other_token(50)), two(TOKENS))
    mine, theirs = noise_of(order, 1, TOKENS[AT], 50)
    assert (parting.choice, parting.token_index) == (1, AT)
    assert parting.gap is not None
    assert math.isclose(parting.gap, mine - theirs, abs_tol=1e-9)


@pytest.mark.parametrize(
    "option",
    [
        {"repetition_penalty": 1.1},
        {"temperature": 0.9, "top_p": 0.9},
        {"temperature": 0.9, "top_p": 1.0, "top_k": 50},
        {"temperature": 0.9},  # with the model's default top_p
    ],
)
def test_streams_with_incomparable_log_probabilities_are_left_out(option: dict[str, Any]) -> None:
    order = replace(GREEDY, options=GREEDY.options | option)
    assert parted(order, record(other_token(50)), record(TOKENS)) == []


def test_whole_streams_contradict_nothing() -> None:
    assert contradictions([record(TOKENS), record(TOKENS[:1], finish="stop")]) == []


def test_a_lost_or_repeated_token_is_a_contradiction() -> None:
    lost, repeated = record(TOKENS), record(TOKENS)
    lost.token_ids[0] = TOKENS[:-1]
    repeated.token_ids[0] = [*TOKENS, TOKENS[-1]]
    assert [said.split(",")[0] for said in contradictions([record(TOKENS), lost, repeated])] == [
        "stream 1: 3 tokens",
        "stream 2: 5 tokens",
    ]


def test_a_gap_in_offsets_and_a_missing_finish_reason_are_contradictions() -> None:
    gap, endless = record(TOKENS), record(TOKENS)
    gap.seams = ["choice 0: token 3 after 2"]
    endless.finish = {}
    assert contradictions([gap]) == gap.seams
    assert contradictions([endless]) == ["stream 0: 4 tokens, 4 in its usage, ends {}"]


def test_a_failed_stream_is_not_also_a_contradiction() -> None:
    failed = record(TOKENS)
    failed.token_ids[0], failed.error = TOKENS[:1], "NoWorker"
    assert contradictions([failed]) == []


@pytest.mark.parametrize(
    ("own", "others", "contained"),
    [
        ({"NoWorker": 3}, {}, True),
        ({}, {}, False),
        ({"NoWorker": 3, "InternalError": 1}, {}, False),
        ({"InternalError": 3}, {}, False),
        ({"NoWorker": 3}, {"NoWorker": 1}, False),
    ],
)
def test_a_router_loss_is_contained_if_only_its_own_streams_fail_with_unavailable(
    own: dict[str, int], others: dict[str, int], contained: bool
) -> None:
    loss = RouterLoss(own=4, others=5, own_errors=Counter(own), other_errors=Counter(others))
    assert loss.is_contained == contained
    told = str(loss)
    named = {"NoWorker": "UNAVAILABLE"}
    assert all(f"{count} {named.get(n, n)}" in told for errors in (own, others) for n, count in errors.items())
    assert ("of the other's 5: none" in told) == (not others)

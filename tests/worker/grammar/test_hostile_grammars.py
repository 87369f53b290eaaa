"""Grammars that are made to do harm get an answer, in time, and harm nothing else."""

import time
from random import Random

import pytest

from tests.cluster.processes import descendants, resident_bytes
from tests.worker.grammar.grammar_rig import GrammarRig, bits_of
from trunkline_bench.attacks.vectors.hostile_grammars import CLASSES
from trunkline_worker.grammar.grammar_link import Allowed, Compiled

ANSWER_S = 2.0
LATE_ANSWER_S = 20.0  # of single ones, where others take the processors
MOST_GROWTH_BYTES = 1 << 30  # of all processes together


@pytest.mark.parametrize("make", CLASSES, ids=lambda make: make.__name__)
@pytest.mark.parametrize("num", [3, pytest.param(100, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])])
def test_hostile_grammars_are_answered_and_neighbours_go_on(make: object, num: int) -> None:
    assert callable(make)
    with GrammarRig() as rig:
        neighbour = rig.regex("[0-9]{1000}")
        first = digits(rig.begin(1, neighbour))
        before = memory_bytes(rig)
        took_s = []
        for seed in range(num):
            kind, text = make(Random(seed))
            rig.allowed.pop(1)
            rig.link.advance(1, first[:1])
            rig.link.flush()
            start_s = time.monotonic()
            digest, answer = rig.compile(kind, text)
            took_s.append(time.monotonic() - start_s)
            if isinstance(answer, Compiled):
                rig.link.begin(2, digest)
                rig.link.flush()
                rig.until(lambda: 2 in rig.allowed or 2 in rig.broken)
                rig.link.end(2)
                rig.allowed.pop(2, None)
                rig.broken.pop(2, None)
            rig.until(lambda: 1 in rig.allowed)
            assert set(first[:10]) <= set(digits(rig.allowed[1]))
        assert max(took_s) < LATE_ANSWER_S
        assert num < 100 or sorted(took_s)[9 * num // 10] < ANSWER_S
        assert rig.allowed[1].num_output == num
        assert not rig.broken
        assert memory_bytes(rig) - before < MOST_GROWTH_BYTES


def digits(allowed: Allowed) -> list[int]:
    assert allowed.mask is not None
    return bits_of(allowed.mask)


def memory_bytes(rig: GrammarRig) -> int:
    """What the grammar process and those that it has forked take."""
    assert rig.link._process is not None
    return sum(map(resident_bytes, descendants(rig.link._process.pid)))

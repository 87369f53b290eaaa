"""Damaged HTTP/2 connections to the gRPC port: nothing of them remains, and the next client is served."""

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.fuzz import cases
from tests.fuzz.http2_frames import case, recorded
from tests.fuzz.raw_connections import exchanged
from tests.fuzz.target import Target

CASES, ROUND = 300, 100
MANY = int(os.environ.get("TRUNKLINE_FUZZ_CASES", "3000"))
FIRST_SEED = int(os.environ.get("TRUNKLINE_FUZZ_SEED", "0"))
GROWN_MIB = 64.0
FRAMES = "connection"  # files of the corpus that are recorded and not damaged


@pytest.fixture(scope="module")
def connections() -> list[list[bytes]]:
    """Frames of a real client, as they were recorded once: the same in every run."""
    return [list(cases.read(path)) for path in sorted((cases.CORPUS / "recorded").glob("*.bin"))]


def fuzz(target: Target, connections: Sequence[Sequence[bytes]], seeds: range) -> None:
    """Fails with the file of a case that was added to the corpus."""
    for begin in range(seeds.start, seeds.stop, ROUND):
        part = range(begin, min(begin + ROUND, seeds.stop))
        for seed in part:
            exchanged(target.grpc_port, case(seed, connections))
        problems = target.state().problems
        if problems:
            report(target, connections, part, problems)
        target.check_unharmed()


def problem(target: Target, writes: cases.Writes) -> str:
    exchanged(target.grpc_port, writes)
    return "\n".join(target.state().problems)


def report(target: Target, connections: Sequence[Sequence[bytes]], seeds: range, problems: list[str]) -> None:
    for seed in seeds:
        writes = case(seed, connections)
        if told := problem(target, writes):
            pytest.fail(f"seed {seed}, {cases.kept('http2', writes)}: {told}")
    pytest.fail(f"one of the seeds {seeds}: {problems}")


def test_what_a_client_sends_today_is_of_the_recorded_kinds(target: Target, connections: list[list[bytes]]) -> None:
    def kinds(frames: Sequence[bytes]) -> set[int]:
        return {one[3] for one in frames}

    assert [kinds(frames) for frames in recorded(target.grpc_port)]
    assert {0, 1, 4} <= set.union(*(kinds(frames) for frames in connections))


def test_damaged_connections_leave_no_trace(target: Target, connections: list[list[bytes]]) -> None:
    fuzz(target, connections, range(CASES))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_thousands_of_damaged_connections_leave_no_trace(target: Target, connections: list[list[bytes]]) -> None:
    fuzz(target, connections, range(FIRST_SEED, FIRST_SEED + CASES))
    before = target.state()
    fuzz(target, connections, range(FIRST_SEED + CASES, FIRST_SEED + MANY))
    assert target.state().rss_mib - before.rss_mib < GROWN_MIB


@pytest.mark.parametrize("path", sorted((cases.CORPUS / "http2").glob("*.bin")), ids=lambda path: path.name)
def test_connections_that_have_failed_once_stay_mended(target: Target, path: Path) -> None:
    assert not problem(target, cases.read(path))
    target.check_unharmed()

"""Damaged byte streams over HTTP/1.1: the router answers or refuses them, and nothing of them remains."""

import os
import re
from pathlib import Path

import pytest

from tests.fuzz import cases
from tests.fuzz.http_bytes import case
from tests.fuzz.raw_connections import exchanged
from tests.fuzz.target import Target

CASES, ROUND = 600, 200
MANY = int(os.environ.get("TRUNKLINE_FUZZ_CASES", "3000"))
FIRST_SEED = int(os.environ.get("TRUNKLINE_FUZZ_SEED", "0"))
GROWN_MIB = 64.0
STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")
STATUSES = {100, 200, 400, 401, 403, 404, 405, 408, 413, 414, 415, 417, 422, 429, 431, 501}


def problem(target: Target, writes: cases.Writes) -> str:
    """What is wrong with the answer to a case; "" if nothing is."""
    got = exchanged(target.http_port, writes)
    if got and not got.startswith(b"HTTP/1.1 "):
        return f"not HTTP: {got[:200]!r}"
    return wrong_statuses(got) or "\n".join(target.state().problems)


def fuzz(target: Target, seeds: range) -> None:
    """Fails with the file of a case that was added to the corpus."""
    for begin in range(seeds.start, seeds.stop, ROUND):
        part = range(begin, min(begin + ROUND, seeds.stop))
        seen = [told for seed in part if (told := wrong_statuses(exchanged(target.http_port, case(seed))))]
        seen += target.state().problems
        if seen:
            report(target, part, seen)
        target.check_unharmed()


def wrong_statuses(got: bytes) -> str:
    """The statuses that no request may be answered with; "" if there are none."""
    strange = {*map(int, STATUS.findall(got))} - STATUSES
    return f"status {strange}: {got[:1000]!r}" if strange else ""


def report(target: Target, seeds: range, seen: list[str]) -> None:
    for seed in seeds:
        if problem(target, case(seed)):
            least = cases.smaller(case(seed), lambda writes: bool(problem(target, writes)))
            told = problem(target, least)
            pytest.fail(f"seed {seed}, {cases.kept('http', least)}: {b''.join(least)[:500]!r}: {told}")
    pytest.fail(f"one of the seeds {seeds}, which was not found again: {seen}")


def test_damaged_requests_leave_no_trace(target: Target) -> None:
    fuzz(target, range(CASES))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_thousands_of_damaged_requests_leave_no_trace(target: Target) -> None:
    fuzz(target, range(FIRST_SEED, FIRST_SEED + CASES))
    before = target.state()
    fuzz(target, range(FIRST_SEED + CASES, FIRST_SEED + MANY))
    assert target.state().rss_mib - before.rss_mib < GROWN_MIB


@pytest.mark.parametrize("path", sorted((cases.CORPUS / "http").glob("*.bin")), ids=lambda path: path.name)
def test_cases_that_have_failed_once_stay_mended(target: Target, path: Path) -> None:
    assert not problem(target, cases.read(path))
    target.check_unharmed()

"""Freed memory stays for the next large request, and goes back to the system once they have stopped."""

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trunkline_router.access.gate import freed_memory
from trunkline_router.access.gate.freed_memory import (
    MAX_GROWTH_BYTES,
    MIN_CHECKS_APART,
    MIN_GAIN_BYTES,
    QUIET_BYTES,
    FreedMemory,
)

MIB = 1 << 20
BEFORE = 80 * MIB
COME = MIN_GAIN_BYTES  # of large requests, since the last return


def looks(*seen: tuple[int, int]) -> list[bool]:
    """Whether memory goes back at each look: (resident, in requests), after a first one without any."""
    memory = FreedMemory()
    assert not memory.is_due(BEFORE, 0, 0)
    return [memory.is_due(resident, in_requests, COME) for resident, in_requests in seen]


def test_memory_stays_while_large_requests_come_and_goes_back_once_they_have_stopped() -> None:
    grown = BEFORE + MIN_GAIN_BYTES + 1
    assert looks((grown, QUIET_BYTES), (grown, 0), (grown, 0)) == [False, False, True]


def test_little_memory_stays() -> None:
    assert looks((BEFORE + MIN_GAIN_BYTES, 0), (BEFORE + MIN_GAIN_BYTES, 0)) == [False, False]


def test_too_much_goes_back_although_requests_come_but_not_at_every_look() -> None:
    memory, busy = FreedMemory(), 99 * MIB
    memory.is_due(BEFORE, 0, 0)
    assert not any(memory.is_due(BEFORE + MAX_GROWTH_BYTES, busy, COME) for _ in range(2 * MIN_CHECKS_APART))
    for _ in range(3):
        assert memory.is_due(BEFORE + MAX_GROWTH_BYTES + 1, busy, COME)
        memory.returned(BEFORE + MAX_GROWTH_BYTES + 1)
        assert not any(memory.is_due(BEFORE + MAX_GROWTH_BYTES + 1, busy, COME) for _ in range(MIN_CHECKS_APART - 1))


def test_what_was_in_use_at_a_return_goes_back_once_it_is_free() -> None:
    memory, full = FreedMemory(), BEFORE + 3 * MAX_GROWTH_BYTES
    memory.is_due(BEFORE, 0, 0)
    for _ in range(MIN_CHECKS_APART):
        memory.is_due(full, 99 * MIB, COME)
    memory.returned(full)
    assert [memory.is_due(BEFORE + 2 * MIN_GAIN_BYTES, 0, COME) for _ in range(2)] == [False, True]


@given(st.lists(st.tuples(st.integers(MIB, 2000 * MIB), st.integers(0, 200 * MIB)), min_size=1))
def test_what_stays_in_use_after_a_quiet_return_is_not_looked_for_again(seen: list[tuple[int, int]]) -> None:
    memory = FreedMemory()
    for number, (resident, in_requests) in enumerate(seen, 1):
        memory.is_due(resident, in_requests, number * COME)
        memory.is_due(resident, 0, number * COME)
        memory.returned(resident)
        assert not memory.is_due(resident, 0, (number + 1) * COME)
        assert not memory.is_due(resident, 0, (number + 1) * COME)


@given(st.lists(st.integers(MIB, 2000 * MIB), min_size=1))
def test_without_large_requests_nothing_goes_back(seen: list[int]) -> None:
    """What fills the memory then is small, and to look for it holds up the event loop."""
    memory = FreedMemory()
    assert not any(memory.is_due(resident, 0, COME - 1) for resident in seen)


BURST = """
import asyncio
from trunkline_router.access.gate import freed_memory as memory

async def main():
    memory.keep_freed_memory()
    held = []
    looking = asyncio.create_task(memory.return_freed_memory(lambda: (0, memory.MIN_GAIN_BYTES)))
    await asyncio.sleep(3 * memory.CHECK_INTERVAL_S)
    before = memory.resident_bytes() or 0
    pairs = [(bytes(1 << 20), bytes(600)) for _ in range(200)]  # the small ones keep the heap from becoming shorter
    small = [kept for _, kept in pairs]
    full = memory.resident_bytes()
    del pairs
    assert memory.resident_bytes() - before > full - before >> 1, "the next request finds it"
    async with asyncio.timeout(60):
        while memory.resident_bytes() - before > 8 << 20:
            await asyncio.sleep(0.01)
    looking.cancel()

asyncio.run(main())
"""


def test_a_burst_of_large_blocks_is_given_back_by_a_real_process() -> None:
    subprocess.run([sys.executable, "-c", BURST], check=True, timeout=60)


def test_where_the_system_does_not_tell_it_there_is_no_size(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (freed_memory.resident_bytes() or 0) > MIB
    monkeypatch.setattr(freed_memory, "STATM", freed_memory.STATM / "none")
    assert freed_memory.resident_bytes() is None

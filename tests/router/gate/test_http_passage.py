"""Bodies of HTTP requests at the gate."""

import asyncio

import pytest

from tests.router.virtual_time import virtual_time
from trunkline_router.access.access import Access
from trunkline_router.access.gate.http_passage import HttpPassage
from trunkline_router.access.gate.places import Bounds
from trunkline_router.access.gate.reading import Reading
from trunkline_router.access.gate.request_gate import RequestGate
from trunkline_router.access.gate.request_size import UNSEEN_BYTES

LARGE = b" " * (UNSEEN_BYTES + 1)


def passage(gate: RequestGate) -> HttpPassage:
    return HttpPassage(gate, "ipv4:10.0.0.1:50312", "", lambda refused: None)


async def large_body() -> bytes:
    return LARGE


async def test_a_body_that_has_arrived_waits_for_no_place_among_those_being_read() -> None:
    gate = RequestGate(Access())
    gate.reading = Reading(Bounds(in_all=1, of_host=1, of_connection=1, of_tenant=1))
    never = asyncio.get_running_loop().create_future()
    with passage(gate) as first, passage(gate) as second, passage(gate) as third:
        reading = asyncio.create_task(first.read(lambda: never))  # takes the only place
        waiting = asyncio.create_task(second.read(large_body))
        for _ in range(5):
            await asyncio.sleep(0)
        assert not waiting.done()
        async with asyncio.timeout(60):
            assert await third.read_arrived(large_body) == LARGE
        never.set_result(b"")
        assert await reading == b""
        assert await waiting == LARGE


@pytest.mark.parametrize("has_arrived", [False, True])
async def test_a_large_body_counts_until_the_answer_begins(has_arrived: bool) -> None:
    gate = RequestGate(Access())
    with passage(gate) as one:
        await (one.read_arrived(large_body) if has_arrived else one.read(large_body))
        assert gate.held.num_held == len(LARGE)
        one.answer_begins()
        assert gate.held.num_held == 0


@virtual_time
async def test_bodies_of_an_account_wait_for_as_long_as_the_loop_parses_for_it() -> None:
    """A third of the event loop is an account's. The bodies alone would be within its rate."""
    gate, loop = RequestGate(Access()), asyncio.get_running_loop()
    with passage(gate) as first, passage(gate) as second:
        async with first.turn(len(await first.read_arrived(large_body))):
            first.parsed(0.2)
        begun_s = loop.time()
        async with second.turn(len(await second.read_arrived(large_body))):
            assert 0.4 < loop.time() - begun_s < 0.7


@virtual_time
async def test_a_message_of_another_tenant_waits_for_one_step_of_a_large_body() -> None:
    gate, loop = RequestGate(Access()), asyncio.get_running_loop()
    with passage(gate) as one:
        async with one.turn(len(await one.read_arrived(large_body))):
            for _ in range(20):
                one.parsed(0.01)
                begun_s = loop.time()
                async with asyncio.timeout(1):
                    await gate.turns.turn("another tenant")
                assert loop.time() - begun_s < 0.03
                await one.step()


async def test_large_bodies_are_parsed_one_after_another_with_turns_of_the_loop_between_them() -> None:
    gate, order = RequestGate(Access()), list[str]()

    async def parse(one: HttpPassage, name: str) -> None:
        async with one.turn(len(await one.read_arrived(large_body))):
            order.append(f"{name} begins")
            await asyncio.sleep(0)
            order.append(f"{name} ends")

    async def others() -> None:
        for _ in range(9):
            order.append("others")
            await asyncio.sleep(0)

    with passage(gate) as first, passage(gate) as second:
        await asyncio.gather(parse(first, "a"), parse(second, "b"), others())
    assert [each for each in order if each != "others"] == ["a begins", "a ends", "b begins", "b ends"]
    assert "others" in order[order.index("a ends") : order.index("b begins")]

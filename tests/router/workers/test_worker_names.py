"""A worker with several names counts once. A worker that copies another's name and epoch does not displace it."""

import pytest

from tests.router.cluster import cluster, until
from tests.router.liar import Liar, innocents
from trunkline_router.workers.link_context import place_of


@pytest.mark.parametrize("copier_is_first", [False, True])
async def test_who_copies_a_name_and_an_epoch_does_not_take_the_others_place(copier_is_first: bool) -> None:
    copier, worker = Liar("a", answer=2), Liar("a")
    first, second = (copier, worker) if copier_is_first else (worker, copier)
    first.may_speak.set()
    async with cluster(copier, worker, expected=(copier_is_first, not copier_is_first)) as router:
        second.may_speak.set()
        await router.until_workers(True, True)
        for number in range(20):
            await router.answer([30 + number, 5, 6, 7, 8])
        assert worker.submits
        await innocents(router, "tiny")
        await copier.die()
        await until(lambda: router.links[0].worker is None)
        await innocents(router, "tiny")


async def test_places_are_equal_for_names_of_one_host_and_port_alone() -> None:
    here = await place_of("127.0.0.1:7000")
    assert here & await place_of("localhost:7000")
    assert here & await place_of("[::1]:7000")
    assert not here & await place_of("127.0.0.1:7001")
    assert not here & await place_of("192.0.2.1:7000")
    assert await place_of("no-such-host.invalid:7000") == frozenset()

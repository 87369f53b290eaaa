"""Which handshake makes room for a new one."""

import asyncio
import socket
import ssl

from trunkline_router.edge.http.handshakes import Handshakes


class Counted(socket.socket):
    """A socket that is only counted."""

    def __init__(self) -> None:
        super().__init__()
        self.close()
        self.dropped = False

    def shutdown(self, how: int) -> None:
        self.dropped = True


def handshakes_of(most: int) -> Handshakes:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    return Handshakes(asyncio.Protocol, context, most, limit_s=1.0, shutdown_s=1.0)


def added(handshakes: Handshakes, hosts: str) -> list[Counted]:
    counted = [Counted() for _ in hosts]
    for each, host in zip(counted, hosts, strict=True):
        handshakes.add(each, host)
    return counted


def dropped(counted: list[Counted]) -> list[bool]:
    return [each.dropped for each in counted]


def test_the_oldest_makes_room_if_each_comes_from_another_host() -> None:
    handshakes = handshakes_of(4)
    silent = added(handshakes, "abcd")
    [good] = added(handshakes, "e")
    assert dropped(silent) == [True, False, False, False]
    handshakes.remove(good)
    returned, _ = added(handshakes, "eb")  # the host that connects first again is not the oldest one any more
    assert dropped(silent) == [True, True, False, False]
    assert not returned.dropped
    assert len(handshakes) == 4


def test_the_host_with_the_most_loses_its_own_oldest() -> None:
    handshakes = handshakes_of(4)
    other, *many = added(handshakes, "abbb")
    added(handshakes, "b")
    added(handshakes, "c")
    assert dropped(many) == [True, True, False]
    added(handshakes, "a")  # one of those with the most by now, but younger
    assert dropped([other, *many]) == [False, True, True, True]


def test_of_the_hosts_with_the_most_the_one_whose_handshake_is_the_oldest_loses_it() -> None:
    handshakes = handshakes_of(5)
    counted = added(handshakes, "caabb")
    added(handshakes, "b")
    assert dropped(counted) == [False, True, False, False, False]


def test_a_handshake_is_removed_once() -> None:
    handshakes = handshakes_of(2)
    first, second = added(handshakes, "ab")
    handshakes.remove(first)
    handshakes.remove(first)
    assert len(handshakes) == 1
    added(handshakes, "a")
    assert dropped([first, second]) == [False, False]


def test_addresses_of_one_ipv6_network_count_together() -> None:
    handshakes = handshakes_of(3)
    [other] = added(handshakes, "a")
    same = [Counted() for _ in range(3)]
    for number, each in enumerate(same):
        handshakes.add(each, f"2001:db8::{number}")
    assert dropped([other, *same]) == [False, True, False, False]

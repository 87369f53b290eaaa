"""Which handshake makes room for a new one."""

from trunkline_router.edge.http.wire.handshakes import Handshakes


class Counted:
    """A handshake that is only counted."""

    def __init__(self, host: str) -> None:
        self.host, self.dropped = host, False

    def drop(self) -> None:
        self.dropped = True


def added(handshakes: Handshakes, hosts: str) -> list[Counted]:
    counted = [Counted(host) for host in hosts]
    for each in counted:
        handshakes.add(each)
    return counted


def dropped(counted: list[Counted]) -> list[bool]:
    return [each.dropped for each in counted]


def test_the_oldest_makes_room_if_each_comes_from_another_host() -> None:
    handshakes = Handshakes(4)
    silent = added(handshakes, "abcd")
    [good] = added(handshakes, "e")
    assert dropped(silent) == [True, False, False, False]
    handshakes.remove(good)
    returned, _ = added(handshakes, "eb")  # the host that connects first again is not the oldest one any more
    assert dropped(silent) == [True, True, False, False]
    assert not returned.dropped
    assert len(handshakes) == 4


def test_the_host_with_the_most_loses_its_own_oldest() -> None:
    handshakes = Handshakes(4)
    other, *many = added(handshakes, "abbb")
    added(handshakes, "b")
    added(handshakes, "c")
    assert dropped(many) == [True, True, False]
    added(handshakes, "a")  # one of those with the most by now, but younger
    assert dropped([other, *many]) == [False, True, True, True]


def test_of_the_hosts_with_the_most_the_one_whose_handshake_is_the_oldest_loses_it() -> None:
    handshakes = Handshakes(5)
    counted = added(handshakes, "caabb")
    added(handshakes, "b")
    assert dropped(counted) == [False, True, False, False, False]


def test_a_handshake_is_removed_once() -> None:
    handshakes = Handshakes(2)
    first, second = added(handshakes, "ab")
    handshakes.remove(first)
    handshakes.remove(first)
    assert list(handshakes) == [second]
    added(handshakes, "a")
    assert dropped([first, second]) == [False, False]

"""A client takes nothing from one that has less, however many tenants it invents and connections it opens."""

from collections import Counter
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trunkline.status import RequestRefused
from trunkline_router.access.gate.places import (
    Bounds,
    Place,
    Places,
    Sender,
    http_sender_of,
    request_bounds,
    sender_of,
)

CALLS = Bounds(in_all=12, of_host=9, of_connection=6, of_tenant=5)
BYTES = Bounds(in_all=1000, of_host=800, of_connection=600, of_tenant=400)


class Clients:
    """What is held, as its clients know it."""

    def __init__(self, bounds: Bounds) -> None:
        self.places = Places(bounds, "open requests")
        self.held: list[Place] = []
        self.given_up: list[Place] = []

    def take(self, sender: Sender, amount: int = 1, *, is_loose: bool = True) -> Place | None:
        """None: refused."""

        def give_up(refused: RequestRefused) -> None:
            assert (refused.reason, refused.retry_delay_ms > 0) == ("OVERLOADED", True)
            self.held.remove(place)
            self.given_up.append(place)

        try:
            place = self.places.take(sender, give_up, amount)
        except RequestRefused:
            return None
        self.held.append(place)
        if is_loose:
            self.places.loosen(place)
        return place

    def release(self, place: Place) -> None:
        self.places.release(place)
        self.held.remove(place)

    def of(self, level: int, *, loose: bool = False) -> Counter[tuple[str, ...]]:
        """What hosts (1) or connections (2) hold; loose: of what may be given up."""
        counts: Counter[tuple[str, ...]] = Counter()
        for place in self.held:
            if place.may_be_given_up or not loose:
                counts[tuple(place.sender[:level])] += place.amount
        return counts


def any_sender(draw: Random) -> Sender:
    host = f"h{draw.randrange(3)}"
    return Sender(host, f"{host}:{draw.randrange(3)}", draw.choice(["", "a", "b", str(draw.random())]))


@pytest.mark.parametrize(("bounds", "most"), [(CALLS, 1), (BYTES, 200)], ids=["calls", "bytes"])
@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32), st.floats(0, 1))
def test_nothing_is_taken_from_a_holder_of_less_and_the_bounds_hold(
    bounds: Bounds, most: int, seed: int, kept: float
) -> None:
    draw = Random(seed)
    clients = Clients(bounds)
    for _ in range(120):
        if draw.random() < 0.25 and clients.held:
            clients.release(draw.choice(clients.held))
            continue
        sender = any_sender(draw)
        hosts, connections = clients.of(1, loose=True), clients.of(2, loose=True)
        before = len(clients.given_up)
        place = clients.take(sender, draw.randint(1, most))
        for victim in clients.given_up[before:]:
            theirs = victim.sender
            assert theirs.host == sender.host or hosts[theirs[:1]] > hosts[sender[:1]]
            assert theirs.host != sender.host or connections[theirs[:2]] > connections[sender[:2]]
            of_host = {path: amount for path, amount in connections.items() if path[:1] == theirs[:1]}
            assert connections[theirs[:2]] == max(of_host.values())
            hosts[theirs[:1]] -= victim.amount
            connections[theirs[:2]] -= victim.amount
        if place is not None and draw.random() < kept:
            clients.places.keep(place)
        assert clients.places.num_held == sum(place.amount for place in clients.held) <= bounds.in_all
        for level, limit in ((1, bounds.of_host), (2, bounds.of_connection)):
            assert max(clients.of(level).values(), default=0) <= limit
        named: Counter[str] = Counter()
        for place in clients.held:
            named[place.sender.tenant] += place.amount
        del named[""]
        assert max(named.values(), default=0) <= bounds.of_tenant
    for place in (*clients.held, *clients.given_up):
        clients.places.release(place)  # what was given up ends too, a moment later
    state = {name: value for name, value in vars(clients.places).items() if isinstance(value, dict)}
    assert clients.places.num_held == 0
    assert state
    assert not any(state.values())


@pytest.mark.parametrize("connections", [1, 3, 8])
@pytest.mark.parametrize("hosts", [1, 4])
def test_a_client_that_invents_tenants_leaves_calls_to_others_whose_calls_it_does_not_end(
    hosts: int, connections: int
) -> None:
    clients = Clients(request_bounds(64, 32))
    for index in range(2000):
        host = f"evil{index % hosts}"
        clients.take(Sender(host, f"{host}:{index % connections}", f"invented {index}"))
        if index % 50 == 0:
            for where in ("elsewhere", "evil0"):  # another host, and behind the same gateway
                innocent = clients.take(Sender(where, f"{where}:innocent", "acme"))
                assert innocent is not None
                assert innocent in clients.held
                clients.places.keep(innocent)
                clients.release(innocent)


@pytest.mark.parametrize("where", ["elsewhere", "evil"])
def test_invented_tenants_that_hold_all_memory_make_room_for_a_client_that_holds_nothing(where: str) -> None:
    clients = Clients(BYTES)
    for number in range(50):
        clients.take(Sender("evil", f"evil:{number % 2}", f"invented {number}"), 100)
    assert clients.places.num_held == BYTES.of_host
    for _ in range(3):
        assert clients.take(Sender(where, f"{where}:innocent", "acme"), 90) is not None
    assert all(place.sender.connection != f"{where}:innocent" for place in clients.given_up)


def test_calls_whose_requests_were_read_are_not_given_up_and_a_host_leaves_room_for_others() -> None:
    clients = Clients(request_bounds(16, 16))
    while clients.take(sender_of("ipv4:10.0.0.1:5", ""), is_loose=False):
        pass
    assert len(clients.held) == 14
    assert clients.take(sender_of("ipv4:10.0.0.1:6")) is None
    assert clients.take(sender_of("ipv4:10.0.0.2:5")) is not None
    assert not clients.given_up


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 4), st.integers(1, 4))
def test_a_health_check_is_never_refused_whatever_others_keep_open(seed: int, hosts: int, connections: int) -> None:
    draw = Random(seed)
    clients = Clients(CALLS)
    for _ in range(100):
        host = f"h{draw.randrange(hosts)}"
        clients.take(Sender(host, f"{host}:{draw.randrange(connections)}"))
        kubelet = clients.take(Sender("node", "node:1"))
        assert kubelet is not None
        assert kubelet in clients.held
        clients.release(kubelet)


def test_the_last_places_are_for_connections_that_hold_none() -> None:
    clients = Clients(Bounds(in_all=8, of_host=6, of_connection=6, of_tenant=6, spare=2))
    for _ in range(10):
        clients.take(Sender("evil", "evil:1"), is_loose=False)
    assert len(clients.held) == 4
    for number in (2, 3):
        assert clients.take(Sender("evil", f"evil:{number}"), is_loose=False) is not None
    assert clients.take(Sender("evil", "evil:4"), is_loose=False) is None
    assert clients.take(Sender("other", "other:1"), is_loose=False) is not None


def test_the_connections_of_a_tenant_over_http_count_as_one() -> None:
    one, two, other = (
        http_sender_of(peer, tenant) for peer, tenant in (("ipv4:1:5", "acme"), ("ipv4:1:6", "acme"), ("ipv4:1:7", ""))
    )
    assert one == two
    assert one.connection != other.connection
    assert one.host == other.host == sender_of("ipv4:1:5").host

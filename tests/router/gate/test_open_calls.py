"""A client takes no call from one that has fewer, however many tenants it invents and connections it opens."""

from collections import Counter
from collections.abc import Callable
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trunkline.status import RequestRefused
from trunkline_router.access.gate.open_calls import CallBounds, OpenCall, OpenCalls, request_bounds
from trunkline_router.access.gate.ranking import Ranking
from trunkline_router.access.gate.sender import Sender, sender_of

BOUNDS = CallBounds(in_all=12, of_host=9, of_connection=6, of_tenant=5)


class Clients:
    """Calls that are open, as their clients know them."""

    def __init__(self, calls: OpenCalls) -> None:
        self.calls = calls
        self.open: list[OpenCall] = []
        self.given_up: list[OpenCall] = []

    def call(self, sender: Sender, how: Callable[[OpenCalls, OpenCall], None] = OpenCalls.open) -> OpenCall | None:
        """None: refused."""

        def give_up(refused: RequestRefused) -> None:
            assert (refused.reason, refused.retry_delay_ms > 0) == ("OVERLOADED", True)
            self.open.remove(call)
            self.given_up.append(call)

        call = OpenCall(sender, give_up)
        try:
            how(self.calls, call)
        except RequestRefused:
            return None
        self.open.append(call)
        return call

    def rivals(self, level: int, within: tuple[str, ...] = ()) -> Counter[tuple[str, ...]]:
        """Calls that may be given up, by host (1) or connection (2)."""
        senders = (tuple(call.sender[:level]) for call in self.open if call.may_be_given_up)
        return Counter(sender for sender in senders if sender[: len(within)] == within)


def any_sender(draw: Random) -> Sender:
    host = f"h{draw.randrange(3)}"
    return Sender(host, f"{host}:{draw.randrange(3)}", draw.choice(["", "a", "b", str(draw.random())]))


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32), st.floats(0, 1))
def test_no_call_is_taken_from_a_holder_of_fewer_and_the_bounds_hold(seed: int, kept: float) -> None:
    draw = Random(seed)
    clients = Clients(OpenCalls(BOUNDS))
    for _ in range(120):
        if draw.random() < 0.25 and clients.open:
            clients.calls.close(clients.open.pop(draw.randrange(len(clients.open))))
            continue
        sender = any_sender(draw)
        hosts, connections = clients.rivals(1), clients.rivals(2)
        before = len(clients.given_up)
        call = clients.call(sender)
        for victim in clients.given_up[before:]:
            assert call is not None
            theirs, ours = victim.sender, sender
            assert hosts[theirs[:1]] > hosts[ours[:1]] or theirs.host == ours.host
            assert theirs.host != ours.host or connections[theirs[:2]] > connections[ours[:2]] + 1
            assert connections[theirs[:2]] == max(connections[path] for path in connections if path[:1] == theirs[:1])
        if call is not None and draw.random() < kept:
            clients.calls.keep(call)
        assert clients.calls.num_open == len(clients.open) <= BOUNDS.in_all
        for level, most in ((1, BOUNDS.of_host), (2, BOUNDS.of_connection)):
            assert max(Counter(call.sender[:level] for call in clients.open).values(), default=0) <= most
        named = Counter(call.sender.tenant for call in clients.open if call.sender.tenant)
        assert max(named.values(), default=0) <= BOUNDS.of_tenant
    for call in (*clients.open, *clients.given_up):
        clients.calls.close(call)  # one that was given up ends too, a moment later
    state = vars(clients.calls)
    assert clients.calls.num_open == 0
    assert not any(len(counts) for name, counts in state.items() if name not in ("_bounds", "_what", "num_open"))


@pytest.mark.parametrize("connections", [1, 3, 8])
@pytest.mark.parametrize("hosts", [1, 4])
def test_a_client_that_invents_tenants_leaves_calls_to_others_whose_calls_it_does_not_end(
    hosts: int, connections: int
) -> None:
    clients = Clients(OpenCalls(request_bounds(64, 32)))
    for index in range(2000):
        host = f"evil{index % hosts}"
        clients.call(Sender(host, f"{host}:{index % connections}", f"invented {index}"))
        if index % 50 == 0:
            for where in ("elsewhere", "evil0"):  # another host, and behind the same gateway
                innocent = clients.call(Sender(where, f"{where}:innocent", "acme"))
                assert innocent is not None
                assert innocent in clients.open
                clients.calls.keep(innocent)
                clients.calls.close(innocent)
                clients.open.remove(innocent)


def test_calls_whose_requests_were_read_are_not_given_up_and_a_host_leaves_room_for_others() -> None:
    clients = Clients(OpenCalls(request_bounds(16, 16)))
    while (call := clients.call(sender_of("ipv4:10.0.0.1:5", ""))) is not None:
        clients.calls.keep(call)
    assert len(clients.open) == 14
    assert clients.call(sender_of("ipv4:10.0.0.1:6")) is None
    assert clients.call(sender_of("ipv4:10.0.0.2:5")) is not None
    assert not clients.given_up


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 4), st.integers(1, 4))
def test_a_check_is_never_refused_and_takes_the_oldest_one_of_who_has_most(
    seed: int, hosts: int, connections: int
) -> None:
    draw = Random(seed)
    clients = Clients(OpenCalls(BOUNDS))
    for _ in range(100):
        host = f"h{draw.randrange(hosts)}"
        sender = Sender(host, f"{host}:{draw.randrange(connections)}")
        call = clients.call(sender, OpenCalls.open_in_any_case)
        assert call in clients.open
        assert len(clients.open) <= BOUNDS.in_all
        kubelet = clients.call(Sender("node", "node:1"), OpenCalls.open_in_any_case)
        assert kubelet is not None
        assert kubelet in clients.open
        clients.calls.close(kubelet)
        clients.open.remove(kubelet)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abcde"), st.booleans()), max_size=60))
def test_the_first_of_a_ranking_has_the_largest_count(steps: list[tuple[str, bool]]) -> None:
    ranking, counts = Ranking(), Counter[str]()
    for name, is_more in steps:
        if is_more or not counts[name]:
            ranking.add(name)
            counts[name] += 1
        else:
            ranking.remove(name)
            counts[name] -= 1
        first = ranking.first()
        assert (0 if first is None else counts[first]) == max(counts.values())
        assert all(ranking[each] == count for each, count in counts.items())
        assert len(ranking) == len(+counts)

"""Memory for large requests goes to those who hold little: no sender loses any to one that holds more."""

from collections import Counter
from contextlib import ExitStack
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trunkline.status import RequestRefused
from trunkline_router.access.gate.held_bytes import ByteBounds, HeldBytes
from trunkline_router.access.gate.sender import Sender

BOUNDS = ByteBounds(in_all=1000, of_host=800, of_account=400)


class Requests:
    """Those that are held, and what must be true of them all the time."""

    def __init__(self, held: HeldBytes) -> None:
        self.held = held
        self.open: dict[int, tuple[Sender, int, ExitStack]] = {}
        self.given_up: list[Sender] = []
        self._next = 0

    def of(self, length: int) -> Counter[tuple[str, ...]]:
        """Bytes by host (1), connection (2) or tenant on a connection (3)."""
        counts: Counter[tuple[str, ...]] = Counter()
        for sender, num_bytes, _ in self.open.values():
            counts[sender[:length]] += num_bytes
        return counts

    def begin(self, sender: Sender, num_bytes: int) -> int | None:
        """None: refused."""
        self._next += 1
        number = self._next
        stack = ExitStack()

        def give_up(refused: RequestRefused) -> None:
            assert (refused.reason, refused.retry_delay_ms > 0) == ("OVERLOADED", True)
            victim = self.open[number][0]
            newcomer = self.newcomer
            for length in (1, 2, 3):
                if victim[:length] != newcomer[:length]:
                    before = self.of(length)
                    assert before[victim[:length]] > before[newcomer[:length]]
                    break
            else:
                raise AssertionError("a sender ended its own")
            del self.open[number]
            self.given_up.append(victim)

        self.newcomer = sender
        try:
            stack.enter_context(self.held.holding(num_bytes, sender, give_up))
        except RequestRefused:
            return None
        self.open[number] = sender, num_bytes, stack
        return number

    def end(self, number: int) -> None:
        self.open.pop(number)[2].close()


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32))
def test_a_sender_loses_requests_only_to_one_that_holds_less_and_the_bounds_hold(seed: int) -> None:
    draw = Random(seed)
    requests = Requests(HeldBytes(BOUNDS))
    for _ in range(100):
        if draw.random() < 0.2 and requests.open:
            requests.end(draw.choice(list(requests.open)))
            continue
        host = f"h{draw.randrange(3)}"
        sender = Sender(host, f"{host}:{draw.randrange(2)}", draw.choice(["", "a", str(draw.random())]))
        requests.begin(sender, draw.randrange(1, 200))
        assert requests.held.num_bytes == sum(num_bytes for _, num_bytes, _ in requests.open.values()) <= BOUNDS.in_all
        assert max(requests.of(1).values(), default=0) <= BOUNDS.of_host
    for number in list(requests.open):
        requests.end(number)
    assert requests.held.num_bytes == 0
    assert not any(vars(requests.held)[name] for name in ("_of_account", "_of_path", "_held"))


@pytest.mark.parametrize("where", ["elsewhere", "evil"])
def test_invented_tenants_that_hold_all_memory_make_room_for_a_client_that_holds_nothing(where: str) -> None:
    requests = Requests(HeldBytes(BOUNDS))
    for number in range(50):
        requests.begin(Sender("evil", "evil:1", f"invented {number}"), 100)
    assert requests.held.num_bytes == BOUNDS.of_host
    for _ in range(4):
        assert requests.begin(Sender(where, f"{where}:2", "acme"), 90) is not None
    assert all(sender.connection == "evil:1" for sender in requests.given_up)

"""Turns go by host, then by connection, then by tenant: names that are easily invented hold up no other client."""

from collections import Counter
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from trunkline_router.access.gate.rotation import Path, Rotation
from trunkline_router.access.gate.sender import Sender


def always(_: Path) -> bool:
    return True


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5), st.integers(1, 300))
def test_a_client_waits_one_turn_of_each_other_host_and_connection_whatever_names_they_use(
    hosts: int, names: int
) -> None:
    rotation: Rotation[object] = Rotation()
    for host in range(hosts):
        for name in range(names):
            rotation.add(Sender(f"h{host}", f"h{host}:1", f"invented {name}"), object())
    for sender in (Sender("new", "new:1", "acme"), Sender("h0", "h0:2", "acme")):
        rotation.add(sender, sender)
        turns = 0
        while (found := rotation.pop(always)) is not None and found[0] != sender:
            turns += 1
            rotation.add(found[0], object())  # its client sends another one
        assert turns <= 2 * (hosts + 1)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_what_waits_comes_out_once_and_in_its_senders_order_and_only_where_it_may(seed: int) -> None:
    draw = Random(seed)
    rotation: Rotation[int] = Rotation()
    waiting: list[tuple[Sender, int]] = []
    for item in range(150):
        action = draw.random()
        if action < 0.6:
            host = f"h{draw.randrange(3)}"
            sender = Sender(host, f"{host}:{draw.randrange(2)}", str(draw.randrange(3)))
            rotation.add(sender, item)
            waiting.append((sender, item))
        elif action < 0.7 and waiting:
            rotation.remove(*waiting.pop(draw.randrange(len(waiting))))
        else:
            closed = draw.choice([("h0",), ("h1", "h1:0"), ("h2", "h2:1", "0"), ()])

            def may_go(path: Path, closed: Path = closed) -> bool:
                return path != closed

            possible = [each for each in waiting if not closed or each[0][: len(closed)] != closed]
            found = rotation.pop(may_go)
            if found is None:
                assert not possible
                continue
            assert found == next(each for each in possible if each[0] == found[0])
            waiting.remove(found)
        assert bool(rotation) == bool(waiting)
        assert Counter(rotation.senders()) == Counter({sender for sender, _ in waiting})
        assert all((sender in rotation) for sender, _ in waiting)

"""What must hold of the state that a router keeps of its workers, whatever has happened."""

from trunkline_router.routing import prefix_index
from trunkline_router.routing.prefix_index import PrefixIndex
from trunkline_router.workers.pool import Pools


def check_index(index: PrefixIndex) -> None:
    """Asserts that the counts agree with the bits, and that all bits belong to known workers."""
    known = 0
    for slot in (*index.num_held, *index._retired):
        known |= 1 << slot
    held = dict.fromkeys(index.num_held, 0)
    for number, shard in enumerate(index._shards):
        for key, mask in shard.items():
            assert key % prefix_index.SHARDS == number, "a block is in another's shard"
            assert mask, "a block that no worker holds is kept"
            assert not mask & ~known, "a block is held by a worker that is not there"
            for slot in held:
                held[slot] += mask >> slot & 1
    assert held == index.num_held, "blocks miscounted"
    assert not set(index._free) & (set(index.num_held) | set(index._retired)), "a slot is taken and free"
    expected: dict[int, int] = {}
    assert set(index._expecting) == set(index.num_held), "blocks are expected of a worker that is not there"
    for slot, counts in index._expecting.items():
        for key, count in counts.items():
            assert count > 0, "a block is expected by no request"
            expected[key] = expected.get(key, 0) | 1 << slot
    assert expected == index._expected, "expected blocks miscounted"


def check_pools(pools: Pools) -> None:
    """Asserts that the cached pools equal the pools as they would be built now."""
    for name, pool in (pools._models or {}).items():
        now = pools._accepting().get(name)
        assert now is not None, f"no worker of {name} accepts requests any more"
        assert now.workers == pool.workers, f"the workers of {name} are others"
        assert now._has_open_breakers == pool._has_open_breakers, f"breakers of {name} have opened or closed"
    assert pools._models is None or pools._models.keys() == pools._accepting().keys(), "a model has come"

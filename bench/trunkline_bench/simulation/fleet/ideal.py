"""Upper bounds: the hits of a cache that all workers share, and the time to first token of an idle worker."""

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence

from trunkline_bench.simulation.costs.step_work import StepWork
from trunkline_bench.simulation.worker.simulated_executor import StepCost


class SharedCache:
    """An unlimited cache that holds the blocks of every earlier request from its arrival on."""

    def __init__(self) -> None:
        self._held: set[int] = set()  # keys of blocks

    def take(self, chain: Sequence[int], num_tokens: int, block_size: int) -> int:
        """Adds a prompt. Returns the number of its tokens that were cached; at least one token is always computed."""
        held = self._held
        found = bisect_left(chain, True, key=lambda key: key not in held)
        held.update(chain[found:])
        return min(found, (num_tokens - 1) // block_size) * block_size


class FleetSizedCache:
    """The same with the capacity of all pools of the fleet and LRU eviction: roughly what the best routing could
    achieve if the pools held nothing but prefixes."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._held: OrderedDict[int, None] = OrderedDict()  # keys of blocks, the latest used last

    def take(self, chain: Sequence[int], num_tokens: int, block_size: int) -> int:
        """Adds a prompt. Returns the number of its tokens that were cached."""
        held = self._held
        found = bisect_left(chain, True, key=lambda key: key not in held)  # valid since heads outlive tails:
        for key in reversed(chain):
            held[key] = None
            held.move_to_end(key)
        while len(held) > self._num_blocks:
            held.popitem(last=False)
        return min(found, (num_tokens - 1) // block_size) * block_size


def idle_prefill_s(cost: StepCost, num_tokens: int, num_cached: int, step_tokens: int) -> float:
    """Seconds to the first token of a prompt on an idle worker."""
    time_s = 0.0
    for start in range(num_cached, num_tokens, step_tokens):
        end = min(start + step_tokens, num_tokens)
        pairs = (end - start) * (start + (end - start + 1) / 2)
        time_s += cost.step_time_s(
            StepWork(
                num_tokens=end - start,
                num_padding=0,
                num_sampled=int(end == num_tokens),
                num_sequences=1,
                decode_kv_tokens=0,
                chunk_kv_tokens=end,
                chunk_pairs=pairs,
            )
        )
    return time_s

"""What could be had at best: the hits of a cache that is shared by all workers and never forgets, on idle workers."""

from bisect import bisect_left
from collections.abc import Sequence

from trunkline_bench.simulation.simulated_executor import StepCost
from trunkline_bench.simulation.step_work import StepWork


class SharedCache:
    """Holds what every request before has brought, from its arrival on."""

    def __init__(self) -> None:
        self._held: set[int] = set()  # keys of blocks

    def take(self, chain: Sequence[int], num_tokens: int, block_size: int) -> int:
        """Tokens of a prompt that are found, before it is added. One token at least is always computed."""
        held = self._held
        found = bisect_left(chain, True, key=lambda key: key not in held)
        held.update(chain[found:])
        return min(found, (num_tokens - 1) // block_size) * block_size


def idle_prefill_s(cost: StepCost, num_tokens: int, num_cached: int, step_tokens: int) -> float:
    """How long a worker that does nothing else needs for a prompt's first token."""
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

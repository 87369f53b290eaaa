"""Estimates the length of an answer without max_tokens from the tenant's previous answers. Pure.

The estimate is the mean length of answers weighted by length: the expected length of the answer that a random token of
the tenant belongs to. Its memory is measured in tokens, not in answers. So the long answers of a mixture dominate the
estimate, and lowering it takes more than a quarter of the tenant's tokens per minute.
"""

import math
from collections import OrderedDict

# The first estimate for a tenant is such that its quota admits this many answers at once.
COLD_REQUESTS = 16
LEAST_COLD_TOKENS = 256
# Share of the tenant's token quota after which an estimate mostly reflects new answers.
MEMORY_SHARE = 0.25
LEAST_MEMORY_TOKENS = 1024
MAX_TENANTS = 4096  # those with the latest answers; forgotten tenants get the first estimate again, which is cautious


class OutputEstimates:
    """The estimates of all tenants at one router. `quota` is the smaller of a tenant's limits on tokens per minute and
    tokens in flight; None for no limit."""

    def __init__(self) -> None:
        self._tokens: OrderedDict[str, float] = OrderedDict()  # of one choice, by tenant

    def tokens(self, tenant: str, quota: int | None, most_tokens: int) -> int:
        """Estimated output tokens of one choice, at most `most_tokens`."""
        return min(math.ceil(self._tokens.get(tenant, _cold(quota))), most_tokens)

    def learn(self, tenant: str, quota: int | None, num_tokens: float, *, is_whole: bool) -> None:
        """Records that a choice had `num_tokens`. `is_whole` is False if it was cut off and would have been longer."""
        before = self._tokens.get(tenant, _cold(quota))
        if not is_whole and num_tokens <= before:
            return
        memory = max(LEAST_MEMORY_TOKENS, MEMORY_SHARE * quota if quota is not None else 0)
        self._tokens[tenant] = before + (1 - math.exp(-num_tokens / memory)) * (num_tokens - before)
        self._tokens.move_to_end(tenant)
        if len(self._tokens) > MAX_TENANTS:
            self._tokens.popitem(last=False)


def _cold(quota: int | None) -> float:
    return LEAST_COLD_TOKENS if quota is None else max(LEAST_COLD_TOKENS, quota / COLD_REQUESTS)

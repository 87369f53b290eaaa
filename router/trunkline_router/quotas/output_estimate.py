"""How long an answer without max_tokens will be, as far as its tenant's answers so far tell. Pure.

The estimate is the mean length of answers weighted by length: of the answer that a token of the tenant's belongs to.
And time passes for it by tokens, not by answers. So the long answers of a mixture are foreseen, not the many short
ones, and to talk an estimate down takes more than a quarter of what the tenant may have in a minute.
"""

import math
from collections import OrderedDict

# While nothing is known of a tenant's answers, so many of them may run at once, if they can be that long.
COLD_REQUESTS = 16
LEAST_COLD_TOKENS = 256
# Of its token quota: after so many tokens of answers an estimate is mostly what they say.
MEMORY_SHARE = 0.25
LEAST_MEMORY_TOKENS = 1024
MAX_TENANTS = 4096  # those with the latest answers; others are unknown again, which is the careful side


class OutputEstimates:
    """All tenants' at one router. `quota` is how many tokens the tenant may use in a minute or at once, whichever is
    less; None: as many as it likes."""

    def __init__(self) -> None:
        self._tokens: OrderedDict[str, float] = OrderedDict()  # of one choice, by tenant

    def tokens(self, tenant: str, quota: int | None, most_tokens: int) -> int:
        """Of one choice, which can have `most_tokens`."""
        return min(math.ceil(self._tokens.get(tenant, _cold(quota))), most_tokens)

    def learn(self, tenant: str, quota: int | None, num_tokens: float, *, is_whole: bool) -> None:
        """A choice came to so many tokens; not `is_whole`: it was broken off, and would have come to more."""
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

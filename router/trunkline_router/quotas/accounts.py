"""On whose account a tenant's requests are counted. Pure: time is passed in.

Whoever reaches a router names itself, and each name that comes costs keys in Redis and a book in every router. Tenants
that the tenants file lists have accounts of their own. So has everybody else, up to so many names at once; those that
come beyond share one account, with the quotas that each of them would have had, until others have fallen silent.
"""

from collections import OrderedDict

from trunkline_router.quotas.quota import WINDOW_MS

MOST_ACCOUNTS = 4096  # of unlisted tenants, in each router
SHARED_ACCOUNT = "*"
IDLE_WINDOWS = 2  # after which nothing of an account is left in Redis


class Accounts:
    """Of unlisted tenants."""

    def __init__(self, window_ms: int = WINDOW_MS, most: int = MOST_ACCOUNTS) -> None:
        self._idle_ms = IDLE_WINDOWS * window_ms
        self._most = most
        self._used_ms: OrderedDict[str, float] = OrderedDict()  # when last, by tenant; the longest ago first

    def account(self, tenant: str, now_ms: float) -> str:
        """The tenant's own, or the shared one."""
        while self._used_ms and now_ms - next(iter(self._used_ms.values())) > self._idle_ms:
            self._used_ms.popitem(last=False)
        if tenant not in self._used_ms and len(self._used_ms) >= self._most:
            return SHARED_ACCOUNT
        self._used_ms[tenant] = now_ms
        self._used_ms.move_to_end(tenant)
        return tenant

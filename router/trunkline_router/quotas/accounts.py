"""Chooses the account on which a tenant's requests are counted. Pure: time is passed in.

Any client can invent tenant names, and each name costs keys in Redis and memory in every router. Tenants in the tenants
file have their own accounts. So do the first MAX_ACCOUNTS unlisted tenants. Any further tenants share one account, with
the quotas of a single unlisted tenant, until another account is idle.
"""

from collections import OrderedDict

from trunkline_router.quotas.quota import WINDOW_MS

MAX_ACCOUNTS = 4096  # of unlisted tenants, in each router
SHARED_ACCOUNT = "*"
IDLE_WINDOWS = 2  # an account that is idle for this many windows has expired from Redis


class Accounts:
    """The accounts of unlisted tenants."""

    def __init__(self, window_ms: int = WINDOW_MS, max_accounts: int = MAX_ACCOUNTS) -> None:
        self._idle_ms = IDLE_WINDOWS * window_ms
        self._max_accounts = max_accounts
        self._used_ms: OrderedDict[str, float] = OrderedDict()  # time of last use by tenant, oldest first

    def known_account(self, tenant: str) -> str:
        """The account that the tenant's requests are counted on now. Reading it keeps no account in use."""
        is_own = tenant in self._used_ms or len(self._used_ms) < self._max_accounts
        return tenant if is_own else SHARED_ACCOUNT

    def account(self, tenant: str, now_ms: float) -> str:
        """The tenant's own account, or the shared one if there are too many."""
        while self._used_ms and now_ms - next(iter(self._used_ms.values())) > self._idle_ms:
            self._used_ms.popitem(last=False)
        if tenant not in self._used_ms and len(self._used_ms) >= self._max_accounts:
            return SHARED_ACCOUNT
        self._used_ms[tenant] = now_ms
        self._used_ms.move_to_end(tenant)
        return tenant

"""Fairness between the tenants of a lane: the virtual token counter (Sheng et al., OSDI 2024).

Each tenant has a counter of the service it was given, in cost units divided by its weight; the tenant with the smallest
counter goes next. A tenant that returns after a pause is lifted to the smallest counter of the tenants with prompts to
compute, so no tenant saves up service by staying away or by sending its requests under many names. The rule is
work-conserving: the counters decide which tenant goes first, never whether one does.

Sums are kept as whole tokens, so the order in which they are counted cannot change a decision.
"""

from collections.abc import Iterator, Set
from heapq import heapify, heappop, heappush, heapreplace

from trunkline_worker.step.lanes import Lane

# Cost units of a token. An output token takes a forward pass of its own, which reads weights and KV; a token found in
# the prefix cache takes memory and almost no compute.
INPUT_COST = 1.0
OUTPUT_COST = 2.0
CACHED_COST = 0.1
# Idle accounts beyond this number are forgotten, the oldest first: an unlimited number of names must not take an
# unlimited amount of memory.
MAX_IDLE_ACCOUNTS = 4096
# A tenant that returns starts level with the least served one. At the same counter it goes before a tenant that was
# served since, whose prompts would otherwise continue for one step more; but only this many times, so that a stream of
# new tenants does not starve that tenant.
NEWCOMERS_FIRST = 16
MOST_VOID = 64  # void entries of the order before they are swept out


class Account:
    """The service that one tenant has been given in one lane."""

    __slots__ = (
        "cached_tokens", "given_before", "given_when_back", "input_tokens", "is_listed", "lane", "left_at", "lift",
        "output_tokens", "ready", "recomputed_tokens", "returning", "running", "tenant", "waiting", "waiting_tokens",
        "weight",
    )  # fmt: skip

    def __init__(self, lane: Lane, tenant: str, weight: float) -> None:
        self.lane = lane
        self.tenant = tenant
        self.weight = weight
        self.lift = 0.0  # what its counter was set to when it last returned, less what it had been given by then
        self.given_before = 0.0  # cost units under earlier weights: they are part of `lift`
        self.input_tokens = 0  # counted when they are computed
        self.recomputed_tokens = 0  # of sequences that were preempted
        self.cached_tokens = 0
        self.output_tokens = 0
        self.running = 0  # sequences in the running set
        self.waiting = 0  # sequences that wait for their first admission
        self.waiting_tokens = 0  # of those sequences
        self.returning = 0  # preempted sequences that wait
        self.ready = 0  # of all that wait, those that await no resource
        self.is_listed = False  # whether it has an entry in the order of its lane
        self.left_at = 0.0  # virtual time when it last became idle
        self.given_when_back = 0.0  # `given` when it last returned

    @property
    def virtual_tokens(self) -> float:
        """The counter: the tenant with the smallest one goes next."""
        return self.lift + (self.given - self.given_before) / self.weight

    @property
    def given(self) -> float:
        """Cost units in total. Recomputed tokens count, because they take time as well."""
        input_tokens = self.input_tokens + self.recomputed_tokens
        return INPUT_COST * input_tokens + CACHED_COST * self.cached_tokens + OUTPUT_COST * self.output_tokens

    @property
    def num_queued(self) -> int:
        """Waiting sequences, new and preempted."""
        return self.waiting + self.returning

    @property
    def is_idle(self) -> bool:
        """Whether the tenant has no sequences in this lane, or only such as await a resource."""
        return not (self.running or self.ready)

    def set_weight(self, weight: float) -> None:
        """Changes the weight; service given so far keeps the weight it was given at."""
        if weight == self.weight:
            return
        self.lift = self.virtual_tokens
        self.given_before = self.given
        self.weight = weight


class Accounts:
    """All accounts of one lane, and the order of those with sequences that are ready to be admitted.

    A sequence that waits joins the queue. It also lines up, unless it awaits a resource: a tenant gains nothing from
    sequences that could not be computed.
    """

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self._accounts: dict[str, Account] = {}
        # (counter when pushed, tie, account): one entry for each account with ready sequences, and for some without.
        # Counters only grow, so the smallest entry that is up to date is the smallest of all.
        self._order: list[tuple[float, float, Account]] = []
        self._aside: list[tuple[float, float, Account]] = []
        self._pushes = 0
        self._last_left = 0.0  # counter of the last account whose last ready sequence stepped out
        self._num_ready = 0  # accounts with ready sequences
        self._num_waiting = 0  # accounts with waiting sequences, and the sum of their weights
        self._waiting_weight = 0.0
        self.begun: Set[Account] = frozenset()  # those with a prompt that the last step did not compute to its end
        self.num_active = 0  # accounts with ready or running sequences, and the sum of their weights
        self._active_weight = 0.0
        self._virtual_time = 0.0  # see _advance()

    def __iter__(self) -> Iterator[Account]:
        return iter(self._accounts.values())

    def account(self, tenant: str, weight: float) -> Account:
        """A tenant's account, created if needed, with its weight updated."""
        account = self._accounts.get(tenant)
        if account is None:
            if len(self._accounts) >= MAX_IDLE_ACCOUNTS:
                self._forget_idle()
            account = self._accounts[tenant] = Account(self.lane, tenant, weight)
            self._virtual_time = max(self._virtual_time, self._floor())
            account.lift = account.left_at = self._virtual_time
        if account.num_queued:
            self._waiting_weight += weight - account.weight
        if not account.is_idle:
            self._active_weight += weight - account.weight
        account.set_weight(weight)
        return account

    def find(self, tenant: str) -> Account | None:
        """A tenant's account; None if it has none."""
        return self._accounts.get(tenant)

    @property
    def is_contended(self) -> bool:
        """Whether more than one tenant has sequences in this lane."""
        return self.num_active > 1

    @property
    def fair_share(self) -> float:
        """The part of a resource, over its weight, that each tenant has if all active tenants take their shares."""
        return 1.0 / self._active_weight

    def start(self, account: Account) -> None:
        """One more sequence of the account runs."""
        self._becomes_active(account)
        account.running += 1

    def stop(self, account: Account) -> None:
        """One sequence of the account no longer runs."""
        account.running -= 1
        self._may_be_idle(account)

    def join(self, account: Account, num_tokens: int) -> None:
        """One more sequence of the account, of `num_tokens`, waits for its first admission."""
        self._joins(account)
        account.waiting += 1
        account.waiting_tokens += num_tokens

    def leave(self, account: Account, num_tokens: int) -> None:
        """One sequence that waited for its first admission no longer waits."""
        account.waiting -= 1
        account.waiting_tokens -= num_tokens
        self._may_have_left(account)

    def join_again(self, account: Account) -> None:
        """One more sequence of the account was preempted, and waits."""
        self._joins(account)
        account.returning += 1

    def leave_again(self, account: Account) -> None:
        """One preempted sequence no longer waits."""
        account.returning -= 1
        self._may_have_left(account)

    def line_up(self, account: Account) -> None:
        """One more waiting sequence of the account is ready to be admitted."""
        self._becomes_active(account)
        if not account.ready:
            self._num_ready += 1
            behind = self._floor() - account.virtual_tokens
            if behind > 0:
                account.lift += behind
            if not account.is_listed:
                self._list(account)
        account.ready += 1

    def step_out(self, account: Account) -> None:
        """One sequence of the account that was ready no longer waits, or awaits a resource."""
        account.ready -= 1
        if not account.ready:
            self._last_left = account.virtual_tokens
            self._num_ready -= 1
            if len(self._order) > 2 * self._num_ready + MOST_VOID:
                self._sweep()
        self._may_be_idle(account)

    def _joins(self, account: Account) -> None:
        if not account.num_queued:
            self._num_waiting += 1
            self._waiting_weight += account.weight

    def _may_have_left(self, account: Account) -> None:
        if not account.num_queued:
            self._num_waiting -= 1
            # Set to 0 when no account waits, so that rounding errors do not add up.
            self._waiting_weight = self._waiting_weight - account.weight if self._num_waiting else 0.0

    def _becomes_active(self, account: Account) -> None:
        if account.is_idle:
            self.num_active += 1
            self._active_weight += account.weight
            # Service it lacked when it became idle is still due to it, but not what others were given since.
            behind = self._virtual_time - account.virtual_tokens
            account.lift += max(0.0, min(behind, self._virtual_time - account.left_at))
            account.given_when_back = account.given

    def _may_be_idle(self, account: Account) -> None:
        if account.is_idle:
            self._advance(account)
            self.num_active -= 1
            self._active_weight = self._active_weight - account.weight if self.num_active else 0.0

    def _advance(self, account: Account) -> None:
        """Advances virtual time when an account becomes idle. Virtual time is what a never idle account would have
        been given by now, over its weight (generalised processor sharing: Parekh and Gallager, 1993).

        Service is counted only when an account becomes idle, so virtual time is never ahead. New accounts start from
        it. Otherwise requests sent one by one under many names would always go before another tenant's: each of the
        names would start level with the least served tenant.
        """
        self._virtual_time += (account.given - account.given_when_back) / self._active_weight
        account.given_when_back = account.given
        account.left_at = self._virtual_time

    def next(self) -> Account | None:
        """The account to serve next, apart from those set aside; None if there is none."""
        while self._order:
            counter, _, account = self._order[0]
            if not account.ready:
                heappop(self._order)
                account.is_listed = False
            elif account.virtual_tokens > counter:
                self._pushes += 1
                # The half keeps all entries different, so accounts are never compared.
                tie = self._pushes + NEWCOMERS_FIRST + 0.5
                heapreplace(self._order, (account.virtual_tokens, tie, account))
            else:
                return account
        return None

    def set_aside(self) -> None:
        """Passes over the account that next() has just returned, until restore()."""
        self._aside.append(heappop(self._order))

    def restore(self) -> None:
        """Puts all accounts that were set aside back."""
        for entry in self._aside:
            heappush(self._order, entry)
        self._aside.clear()

    def _sweep(self) -> None:
        """Drops the entries of accounts without ready sequences."""
        for _, _, account in self._order:
            account.is_listed = account.ready > 0
        self._order = [entry for entry in self._order if entry[2].is_listed]
        heapify(self._order)

    def _list(self, account: Account) -> None:
        self._pushes += 1
        heappush(self._order, (account.virtual_tokens, self._pushes, account))
        account.is_listed = True

    def waiting_weight(self) -> float:
        """Sum of the weights of the accounts with waiting sequences, up to rounding."""
        return self._waiting_weight

    def check_integrity(self) -> None:
        """Asserts that the sums are right, and that each account with ready sequences is listed once."""
        active = [account.weight for account in self._accounts.values() if not account.is_idle]
        assert len(active) == self.num_active, "active accounts miscounted"
        assert abs(sum(active) - self._active_weight) <= 1e-6 * (1 + sum(active)), (
            "weights of active accounts miscounted"
        )
        waiting = [account.weight for account in self._accounts.values() if account.num_queued]
        assert len(waiting) == self._num_waiting, "accounts that wait miscounted"
        assert abs(sum(waiting) - self._waiting_weight) <= 1e-6 * (1 + sum(waiting)), "weights that wait miscounted"
        assert not self._aside, "an account is still passed over"
        listed = [id(account) for _, _, account in self._order]
        assert len(listed) == len(set(listed)), "an account is listed twice"
        ready = {id(account) for account in self._accounts.values() if account.ready}
        assert len(ready) == self._num_ready, "ready accounts miscounted"
        assert ready <= set(listed), "an account waits that will never be served"
        assert len(listed) <= 2 * len(ready) + MOST_VOID + 1, "void entries pile up"

    def _floor(self) -> float:
        """The counter at which a newcomer starts: that of the least served account with prompts to compute."""
        account = self.next()
        begun = [one.virtual_tokens for one in self.begun if one.running]
        if account is None:
            return min([self._last_left, *begun])
        return min([account.virtual_tokens, *begun])

    def _forget_idle(self) -> None:
        """Drops the half of the idle accounts that is oldest."""
        idle = [tenant for tenant, account in self._accounts.items() if account.is_idle and not account.num_queued]
        for tenant in idle[: max(1, len(idle) // 2)]:
            del self._accounts[tenant]

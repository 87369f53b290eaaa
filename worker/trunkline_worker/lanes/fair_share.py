"""Fairness between the tenants of a lane: the virtual token counter (Sheng et al., OSDI 2024).

Each tenant has a counter of what it was given, in cost units divided by its weight; the tenant with the smallest one
goes next. A tenant that comes back after a pause is lifted to the smallest counter of those that have prompts to
compute, and makes up for what all were given meanwhile: no tenant saves up service by staying away, or by sending its
requests under many names. It is work-conserving: the counters decide who goes first, never whether anybody goes.

Sums are kept as whole tokens, so the order in which they are counted cannot change a decision.
"""

from collections.abc import Iterator, Set
from heapq import heapify, heappop, heappush, heapreplace

from trunkline_worker.lanes.lanes import Lane

# Cost units of a token. An output token takes a pass of its own, which reads weights and KV; a token found in the
# prefix cache takes memory and next to no compute.
INPUT_COST = 1.0
OUTPUT_COST = 2.0
CACHED_COST = 0.1
# Counters of tenants that have nothing here. Beyond it those that went longest ago are forgotten: an unlimited number
# of names must not be an unlimited amount of memory.
MAX_IDLE_ACCOUNTS = 4096
# A tenant that comes back starts level with the least served one. At the same counter it goes before one that has been
# served since that one came, which otherwise had its prompts go on for one step more; but not before it for ever, while
# new tenants keep coming.
NEWCOMERS_FIRST = 16
MOST_VOID = 64  # entries of the order that stand for nothing before they are swept out


class Account:
    """What one tenant has been given in one lane."""

    __slots__ = (
        "cached_tokens", "given_before", "given_when_back", "input_tokens", "is_listed", "lane", "left_at", "lift",
        "output_tokens", "recomputed_tokens", "returning", "running", "tenant", "waiting", "waiting_tokens", "weight",
    )  # fmt: skip

    def __init__(self, lane: Lane, tenant: str, weight: float) -> None:
        self.lane = lane
        self.tenant = tenant
        self.weight = weight
        self.lift = 0.0  # where its counter was set to when it last came back, less what it had been given by then
        self.given_before = 0.0  # cost units under an earlier weight: they are in `lift`
        self.input_tokens = 0  # as they are computed
        self.recomputed_tokens = 0  # of sequences that were preempted
        self.cached_tokens = 0
        self.output_tokens = 0
        self.running = 0  # sequences in the running set
        self.waiting = 0  # sequences that wait for their first admission
        self.waiting_tokens = 0  # theirs
        self.returning = 0  # sequences that were preempted, and wait
        self.is_listed = False  # whether it has an entry in the order of its lane
        self.left_at = 0.0  # virtual time when it last had something here
        self.given_when_back = 0.0  # `given` when it came back

    @property
    def virtual_tokens(self) -> float:
        return self.lift + (self.given - self.given_before) / self.weight

    @property
    def given(self) -> float:
        """Cost units, in all. What is computed again counts: it takes others' time, too."""
        input_tokens = self.input_tokens + self.recomputed_tokens
        return INPUT_COST * input_tokens + CACHED_COST * self.cached_tokens + OUTPUT_COST * self.output_tokens

    @property
    def num_queued(self) -> int:
        """Sequences that wait, for whatever reason."""
        return self.waiting + self.returning

    @property
    def is_idle(self) -> bool:
        return not (self.running or self.waiting or self.returning)

    def set_weight(self, weight: float) -> None:
        """What it was given so far keeps the weight of its time."""
        if weight == self.weight:
            return
        self.lift = self.virtual_tokens
        self.given_before = self.given
        self.weight = weight


class Accounts:
    """All accounts of one lane, and the order of those with something waiting."""

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self._accounts: dict[str, Account] = {}
        # (counter when pushed, tie, account) of each account with waiting sequences, and of some without; once.
        # Counters only grow, so the smallest entry that is up to date is the smallest of all.
        self._order: list[tuple[float, float, Account]] = []
        self._aside: list[tuple[float, float, Account]] = []
        self._pushes = 0
        self._last_left = 0.0  # counter of the last account whose queue ran empty
        self._num_waiting = 0  # accounts with something waiting, and the sum of their weights
        self._waiting_weight = 0.0
        self.begun: Set[Account] = frozenset()  # with a prompt that was not computed to its end in the last step
        self.num_active = 0  # accounts with something that waits or runs, and the sum of their weights
        self._active_weight = 0.0
        self._virtual_time = 0.0  # see _advance()

    def __iter__(self) -> Iterator[Account]:
        return iter(self._accounts.values())

    def account(self, tenant: str, weight: float) -> Account:
        """A tenant's account, with its weight as of now."""
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
        """A tenant's account, if it has one."""
        return self._accounts.get(tenant)

    @property
    def is_contended(self) -> bool:
        """Whether more than one tenant has something here."""
        return self.num_active > 1

    @property
    def fair_share(self) -> float:
        """What each tenant may have of a resource, over its weight, if all that are here take what is theirs."""
        return 1.0 / self._active_weight

    def start(self, account: Account) -> None:
        """One more sequence of it runs."""
        self._becomes_active(account)
        account.running += 1

    def stop(self, account: Account) -> None:
        """One sequence of it no longer runs."""
        account.running -= 1
        self._may_be_idle(account)

    def join(self, account: Account, num_tokens: int) -> None:
        """One more sequence of it waits for the first time, of so many tokens."""
        self._queues_up(account)
        account.waiting += 1
        account.waiting_tokens += num_tokens

    def leave(self, account: Account, num_tokens: int) -> None:
        """One sequence that waited for the first time does so no longer."""
        account.waiting -= 1
        account.waiting_tokens -= num_tokens
        self._may_have_left(account)

    def join_again(self, account: Account) -> None:
        """One more sequence of it was preempted, and waits."""
        self._queues_up(account)
        account.returning += 1

    def leave_again(self, account: Account) -> None:
        """One sequence that was preempted waits no longer."""
        account.returning -= 1
        self._may_have_left(account)

    def _queues_up(self, account: Account) -> None:
        self._becomes_active(account)
        if account.num_queued:
            return
        self._num_waiting += 1
        self._waiting_weight += account.weight
        behind = self._floor() - account.virtual_tokens
        if behind > 0:
            account.lift += behind
        if not account.is_listed:
            self._list(account)

    def _may_have_left(self, account: Account) -> None:
        if not account.num_queued:
            self._last_left = account.virtual_tokens
            self._num_waiting -= 1
            # From nothing to nothing: rounding errors do not add up.
            self._waiting_weight = self._waiting_weight - account.weight if self._num_waiting else 0.0
            if len(self._order) > 2 * self._num_waiting + MOST_VOID:
                self._sweep()
        self._may_be_idle(account)

    def _becomes_active(self, account: Account) -> None:
        if account.is_idle:
            self.num_active += 1
            self._active_weight += account.weight
            # What it had not been given when it left is still owed to it, but not what others were given since.
            behind = self._virtual_time - account.virtual_tokens
            account.lift += max(0.0, min(behind, self._virtual_time - account.left_at))
            account.given_when_back = account.given

    def _may_be_idle(self, account: Account) -> None:
        if account.is_idle:
            self._advance(account)
            self.num_active -= 1
            self._active_weight = self._active_weight - account.weight if self.num_active else 0.0

    def _advance(self, account: Account) -> None:
        """Counts what an account that leaves was given into virtual time: what an account that always had something
        here would have been given by now, over its weight (generalised processor sharing: Parekh and Gallager, 1993).

        It counts when an account leaves, so virtual time is never ahead. Accounts that are not known start from it.
        Otherwise requests that come one by one under many names would go before another tenant's for ever: each of
        them would start level with the least served one.
        """
        self._virtual_time += (account.given - account.given_when_back) / self._active_weight
        account.given_when_back = account.given
        account.left_at = self._virtual_time

    def next(self) -> Account | None:
        """The account to be served next, apart from those set aside."""
        while self._order:
            counter, _, account = self._order[0]
            if not account.num_queued:
                heappop(self._order)
                account.is_listed = False
            elif account.virtual_tokens > counter:
                self._pushes += 1
                # Half a place: no two entries are equal, and accounts are never compared.
                tie = self._pushes + NEWCOMERS_FIRST + 0.5
                heapreplace(self._order, (account.virtual_tokens, tie, account))
            else:
                return account
        return None

    def set_aside(self) -> None:
        """The one to be served next is not looked at before restore()."""
        self._aside.append(heappop(self._order))

    def restore(self) -> None:
        """All count again."""
        for entry in self._aside:
            heappush(self._order, entry)
        self._aside.clear()

    def _sweep(self) -> None:
        """Drops the entries of accounts that have nothing waiting."""
        for _, _, account in self._order:
            account.is_listed = account.num_queued > 0
        self._order = [entry for entry in self._order if entry[2].is_listed]
        heapify(self._order)

    def _list(self, account: Account) -> None:
        self._pushes += 1
        heappush(self._order, (account.virtual_tokens, self._pushes, account))
        account.is_listed = True

    def waiting_weight(self) -> float:
        """Sum of the weights of the accounts with something waiting, but for rounding."""
        return self._waiting_weight

    def check_integrity(self) -> None:
        """Asserts that the sums are right, and that each account that waits is listed once."""
        active = [account.weight for account in self._accounts.values() if not account.is_idle]
        assert len(active) == self.num_active, "accounts with something here miscounted"
        assert abs(sum(active) - self._active_weight) <= 1e-6 * (1 + sum(active)), "weights that are here miscounted"
        waiting = [account.weight for account in self._accounts.values() if account.num_queued]
        assert len(waiting) == self._num_waiting, "accounts that wait miscounted"
        assert abs(sum(waiting) - self._waiting_weight) <= 1e-6 * (1 + sum(waiting)), "weights that wait miscounted"
        assert not self._aside, "an account is still passed over"
        listed = [id(account) for _, _, account in self._order]
        assert len(listed) == len(set(listed)), "an account is listed twice"
        waits = {id(account) for account in self._accounts.values() if account.num_queued}
        assert waits <= set(listed), "an account waits, and nobody will ever serve it"
        assert len(listed) <= 2 * len(waits) + MOST_VOID + 1, "entries that stand for nothing pile up"

    def _floor(self) -> float:
        """Where a newcomer starts: level with the least served of those that have prompts to compute."""
        account = self.next()
        begun = [one.virtual_tokens for one in self.begun if one.running]
        if account is None:
            return min([self._last_left, *begun])
        return min([account.virtual_tokens, *begun])

    def _forget_idle(self) -> None:
        """Drops the idle half that came first."""
        idle = [tenant for tenant, account in self._accounts.items() if account.is_idle]
        for tenant in idle[: max(1, len(idle) // 2)]:
            del self._accounts[tenant]

"""Turns at a few places, in virtual time: no account holds up another one for long."""

from collections import Counter, deque
from dataclasses import dataclass, field
from heapq import heappop, heappush

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from trunkline_router.prompts.fair_turns import Bounds, FairTurns, Job

SLICE_S = 0.1
WIDE = Bounds(10**9, 10**9, 10**9, 10**9)


@dataclass(eq=False)
class Wish:
    account: str
    at_s: float
    lasts_s: float
    weight: float = 1.0
    begun_s: list[float] = field(default_factory=list)
    ended_s: float | None = None

    @property
    def waited_s(self) -> float:
        return self.begun_s[0] - self.at_s


class Room:
    """Places in virtual time: jobs last as long as they wish, and begin anew where they gave way."""

    def __init__(self, turns: FairTurns) -> None:
        self.turns = turns
        self.now_s = 0.0
        self._events: list[tuple[float, int, str, Wish, int]] = []
        self._number = 0
        self._jobs: dict[Wish, Job] = {}
        self._wishes: dict[Job, Wish] = {}
        self.held: Counter[str] = Counter()

    def run(self, wishes: list[Wish]) -> None:
        for wish in wishes:
            self._later(wish.at_s, "join", wish, 0)
        while self._events:
            self.now_s, _, what, wish, run = heappop(self._events)
            if what == "join":
                job = self.turns.join(wish.account, 1, wish.weight)
                assert job is not None
                self._jobs[wish], self._wishes[job] = job, wish
            elif run != len(wish.begun_s):
                continue  # of a run that was cut short
            elif what == "end":
                self.turns.end(self._jobs[wish], self.now_s)
                wish.ended_s = self.now_s
                self.held[wish.account] -= 1
            else:
                self.turns.outlasts(self._jobs[wish])
            self._settle()

    def _settle(self) -> None:
        while True:
            while (job := self.turns.next(self.now_s)) is not None:
                wish = self._wishes[job]
                wish.begun_s.append(self.now_s)
                self.held[wish.account] += 1
                assert self.held[wish.account] <= self.turns.of_one
                assert self.held.total() <= self.turns.places
                if wish.lasts_s > SLICE_S:
                    self._later(self.now_s + SLICE_S, "outlasts", wish, len(wish.begun_s))
                self._later(self.now_s + wish.lasts_s, "end", wish, len(wish.begun_s))
            recalled = self.turns.recalled()
            if recalled is None:
                return
            wish = self._wishes[recalled]
            assert self.now_s - wish.begun_s[-1] >= SLICE_S - 1e-9
            self.held[wish.account] -= 1
            self.turns.wait_again(recalled, self.now_s)

    def _later(self, at_s: float, what: str, wish: Wish, run: int) -> None:
        self._number += 1
        heappush(self._events, (at_s, self._number, what, wish, run))


SIZES = st.sampled_from([(2, 1), (3, 1), (4, 2), (4, 3), (8, 4)])
WHAT_HAPPENS = ["join", "next", "outlasts", "recalled", "end"]
LENGTHS = st.sampled_from([0.001, 0.02, 0.099, 0.15, 0.5, 2.0, 60.0])
HOSTILE = st.lists(
    st.tuples(st.integers(0, 5), st.floats(0, 3), LENGTHS, st.sampled_from([0.1, 1.0, 5.0])), min_size=1, max_size=60
)


@settings(max_examples=120, deadline=None)
@given(SIZES, HOSTILE, st.lists(st.tuples(st.floats(0, 6), st.floats(0.001, 0.099)), min_size=1, max_size=8))
@example((4, 2), [(n % 6, 0.0, 60.0, 1.0) for n in range(60)], [(0.0, 0.01), (0.05, 0.01), (0.3, 0.01)])
def test_work_that_ends_within_its_slice_waits_for_one_slice_of_each_other_account_at_most(
    sizes: tuple[int, int], hostile: list[tuple[int, float, float, float]], innocent: list[tuple[float, float]]
) -> None:
    """Whatever the others ask for, and everything is done in the end, having given way once at most."""
    wishes = [Wish(f"hostile {n}", at_s, lasts_s, weight) for n, at_s, lasts_s, weight in hostile]
    at_s, asked = 0.0, []
    for pause_s, lasts_s in innocent:  # one after the other, as far apart as the bound is long
        at_s += pause_s + 1.0
        asked.append(Wish("innocent", at_s, lasts_s))
    room = Room(FairTurns(*sizes, WIDE))
    room.run(wishes + asked)
    others = len({wish.account for wish in wishes})
    for wish in asked:
        assert wish.waited_s <= (others + 1) * SLICE_S + 1e-6
    for wish in wishes + asked:
        assert wish.ended_s is not None
        assert len(wish.begun_s) <= 2
        assert len(wish.begun_s) == 1 or wish.lasts_s > SLICE_S
    assert room.turns.is_idle
    assert room.turns.num_free == sizes[0]
    assert not room.turns._num_slow


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 100), LENGTHS, st.floats(0, 5))
def test_beside_one_hostile_account_there_is_always_a_place(jobs: int, lasts_s: float, at_s: float) -> None:
    innocent = Wish("innocent", at_s, 0.01)
    Room(FairTurns(4, 2, WIDE)).run([*(Wish("hostile", 0.0, lasts_s) for _ in range(jobs)), innocent])
    assert innocent.waited_s == 0


def test_two_hostile_accounts_cannot_hold_up_a_third_one() -> None:
    innocent = [Wish("innocent", 0.3 + at / 10, 0.01) for at in range(100)]
    hostile = [Wish(name, 0.0, 2.0) for name in "ab" for _ in range(20)]
    Room(FairTurns(4, 2, WIDE)).run(hostile + innocent)
    assert max(wish.waited_s for wish in innocent) == 0, "the last place is for others than slow ones"


@pytest.mark.parametrize("weights", [(1.0, 1.0), (3.0, 1.0), (0.5, 5.0)])
def test_accounts_that_always_want_more_share_the_time_by_weight(weights: tuple[float, float]) -> None:
    """Jobs of the one are twenty times as long as those of the other."""
    wishes = [Wish("long", 0.0, 0.08, weights[0]) for _ in range(2000)]
    wishes += [Wish("short", 0.0, 0.004, weights[1]) for _ in range(40_000)]
    Room(FairTurns(2, 2, WIDE)).run(wishes)
    until_s = 20.0
    served = Counter[str]()
    for wish in wishes:
        if wish.begun_s[0] < until_s:
            served[wish.account] += wish.lasts_s  # type: ignore[assignment]
    assert served["long"] / served["short"] == pytest.approx(weights[0] / weights[1], rel=0.05)


def test_leaving_for_a_moment_makes_nobody_forget_what_an_account_has_used() -> None:
    """One job after the other of 90 ms, beside two of 1 ms: with a share each, not with a turn each."""
    turns, served, now_s = FairTurns(1, 1, WIDE), Counter[str](), 0.0
    lasts_s = {"greedy": 0.09, "a": 0.01, "b": 0.01}
    jobs = {turns.join(name, 1, 1.0): name for name in lasts_s}
    for _ in range(3000):
        job = turns.next(now_s)
        assert job is not None
        name = jobs.pop(job)
        now_s += lasts_s[name]
        served[name] += lasts_s[name]  # type: ignore[assignment]
        turns.end(job, now_s)
        jobs[turns.join(name, 1, 1.0)] = name
    assert max(served.values()) - min(served.values()) < 0.2


def test_an_account_has_its_own_measure_and_all_have_one_in_which_the_largest_gives_way() -> None:
    turns = FairTurns(1, 1, Bounds(jobs_of_one=4, jobs_of_all=6, bytes_of_one=100, bytes_of_all=150))
    running = turns.join("other", 1, 1.0)
    assert turns.next(0.0) is running
    hogs = deque(turns.join("hog", 24, 1.0) for _ in range(4))
    assert turns.join("hog", 1, 1.0) is None, "too many"
    assert turns.displaced() is None
    assert turns.join("large", 101, 1.0) is None, "too large"
    large = turns.join("large", 60, 1.0)
    assert large is not None
    assert turns.displaced() is hogs[-1], "the last one of whoever has most"
    last = hogs.pop()
    assert last is not None
    turns.end(last, 0.0)
    assert turns.displaced() is None
    innocent = turns.join("innocent", 1, 1.0)
    assert innocent is not None
    assert turns.displaced() is None
    assert turns.join("another", 1, 1.0) is not None
    assert turns.displaced() is hogs.pop(), "seven jobs are one too many: the one with most jobs"


def test_accounts_of_equal_size_keep_what_they_have_and_who_comes_last_is_refused() -> None:
    turns = FairTurns(1, 1, Bounds(jobs_of_one=9, jobs_of_all=50, bytes_of_one=9, bytes_of_all=50))
    for name in range(50):
        assert turns.join(name, 1, 1.0) is not None
        assert turns.displaced() is None
    late = turns.join("late", 1, 1.0)
    assert turns.displaced() is late


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(WHAT_HAPPENS), st.integers(0, 4)), max_size=200))
def test_the_books_balance_whatever_happens_in_whatever_order(happens: list[tuple[str, int]]) -> None:
    turns = FairTurns(3, 2, WIDE)
    waiting: list[Job] = []
    running: list[Job] = []
    for now_s, (what, which) in enumerate(happens):
        if what == "join":
            job = turns.join(which, 1, 1.0)
            assert job is not None
            waiting.append(job)
        elif what == "next":
            job = turns.next(now_s)
            may = [job for job in waiting if job.account.num_held < 2]
            if job is None:
                slow = sum(one.account.is_slow for one in running)
                quick = [one for one in may if not one.account.is_slow]
                assert len(running) == 3 or not may or (slow >= 2 and not quick), "no place is kept back"
            else:
                waiting.remove(job)
                running.append(job)
        elif what == "outlasts" and running:
            turns.outlasts(running[which % len(running)])
        elif what == "recalled" and (job := turns.recalled()) is not None:
            running.remove(job)
            turns.wait_again(job, now_s)
            waiting.append(job)
        elif what == "end" and (mine := waiting + running):
            job = mine[which % len(mine)]
            (waiting if job in waiting else running).remove(job)
            turns.end(job, now_s)
            turns.end(job, now_s)
        assert turns.num_free == 3 - len(running)
        assert turns._num_slow == sum(job.account.is_slow for job in running)
        assert turns._num_jobs == len(waiting) + len(running)
    for job in waiting + running:
        turns.end(job, 1e6)
    assert turns.is_idle
    assert turns.num_free == 3
    assert not turns._num_slow
    assert not turns._num_bytes


@pytest.mark.parametrize("again_after", [10**9, 500, 100])
@pytest.mark.parametrize("names", [12, 60])
def test_work_under_many_names_does_not_go_before_an_older_account_for_ever(names: int, again_after: int) -> None:
    """So many jobs are there at any time, each of an account of its own that leaves with it; names come again."""
    lasts_s, asks = 0.02, 40
    turns = FairTurns(4, 2, WIDE)
    now_s, running, number = 0.0, deque[tuple[float, Job]](), 0
    asked = turns.join("innocent", 1, 1.0)
    asked_s, waited_s = now_s, list[float]()
    for number in range(names):
        assert turns.join(f"name {number % again_after}", 1, 1.0)
    while len(waited_s) < asks:
        while (job := turns.next(now_s)) is not None:
            if job is asked:
                waited_s.append(now_s - asked_s)
            running.append((now_s + lasts_s, job))
        now_s, job = running.popleft()
        assert now_s < 120.0, "the older account never has its turn"
        turns.end(job, now_s)
        if job is asked:
            asked, asked_s = turns.join("innocent", 1, 1.0), now_s
        else:
            number += 1
            assert turns.join(f"name {number % again_after}", 1, 1.0)
    # Its fair share is one job in (names + 1), and four places serve 200 a second.
    assert max(waited_s) <= 2 * (names + 1) * lasts_s / 4 + lasts_s

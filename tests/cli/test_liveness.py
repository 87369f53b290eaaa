"""A process counts as hung by Kubernetes' rules, with the numbers of the chart."""

import asyncio
import re
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from trunkline_cli.liveness import CHART_PROBE, Liveness, Probe, is_alive, until_hung

CHART = Path(__file__).parents[2] / "helm" / "trunkline"
PROBE = Probe(period_s=10.0, timeout_s=5.0, failure_threshold=3, start_up_s=100.0, start_up_period_s=1.0)


def test_the_numbers_are_those_of_the_chart() -> None:
    template = (CHART / "templates" / "_helpers.tpl").read_text()
    text = re.search(r"livenessProbe:\n((?:  .*\n)+)", template)
    assert text is not None
    numbers = dict(re.findall(r"  (periodSeconds|timeoutSeconds|failureThreshold): (\d+)", text[1]))
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert CHART_PROBE.period_s == int(numbers["periodSeconds"])
    assert CHART_PROBE.timeout_s == int(numbers["timeoutSeconds"])
    assert CHART_PROBE.failure_threshold == int(numbers["failureThreshold"])
    assert CHART_PROBE.start_up_s == values["workerDefaults"]["startupSeconds"]


@given(outcomes=st.lists(st.tuples(st.booleans(), st.floats(0.1, 30.0)), max_size=60))
def test_it_hangs_after_so_many_failures_in_a_row_or_without_any_answer_in_its_time_to_start(
    outcomes: list[tuple[bool, float]],
) -> None:
    watched = Liveness(PROBE, started_s=1000.0)
    now_s, seen = 1000.0, []
    for answered, passed_s in outcomes:
        now_s += passed_s
        seen.append(answered)
        has_answered = any(seen)
        in_a_row = next((n for n, one in enumerate(reversed(seen)) if one), len(seen))
        reason = watched.after(answered, now_s)
        is_late = now_s - 1000.0 >= PROBE.start_up_s
        hangs = in_a_row >= PROBE.failure_threshold if has_answered else is_late
        assert (reason is not None) == hangs
        assert watched.period_s == (PROBE.period_s if has_answered else PROBE.start_up_period_s)
        if reason is not None:
            assert "no answer" in reason
            return


class Clock:
    """A simulated event loop time, which sleep() advances."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        monkeypatch.setattr(asyncio, "sleep", self.sleep)
        monkeypatch.setattr(asyncio, "get_running_loop", lambda: self)

    def time(self) -> float:
        return self.now_s

    async def sleep(self, delay_s: float) -> None:
        self.now_s += delay_s


class Process:
    """A simulated process: it answers probes from `answers_s` on, but not from `hangs_s` to `recovers_s`."""

    def __init__(self, clock: Clock, answers_s: float, hangs_s: float = 1e9, recovers_s: float = 1e9) -> None:
        self.clock = clock
        self.times = answers_s, hangs_s, recovers_s

    async def ask(self, address: str, timeout_s: float) -> bool:
        answers_s, hangs_s, recovers_s = self.times
        if self.clock.now_s > ENOUGH_S:
            raise GoesOn
        if hangs_s <= self.clock.now_s < recovers_s:
            self.clock.now_s += timeout_s
            return False
        return self.clock.now_s >= answers_s


ENOUGH_S = 10_000.0


class GoesOn(Exception):
    """It has lived long enough."""


@pytest.mark.parametrize(
    "times",
    [
        (1795.0,),  # a model that loads for half an hour
        (2.0, 3600.0, 3619.0),  # two probes fail, and the third one does not
        (1700.0, 0.0, 1700.0),  # a front that does not answer while it starts
    ],
)
async def test_a_process_that_loads_or_is_slow_for_a_while_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, times: tuple[float, ...]
) -> None:
    clock = Clock(monkeypatch)
    with pytest.raises(GoesOn):
        await until_hung("there", CHART_PROBE, asyncio.Event(), Process(clock, *times).ask)


@pytest.mark.parametrize(
    ("times", "least_s", "most_s"),
    [
        ((1e9,), 1800.0, 1801.0),  # it never answers
        ((5.0, 4.0), 1800.0, 1806.0),  # it hangs before it has answered: that looks like loading
        ((2.0, 3.0), 25.0, 38.0),  # it hangs as soon as it has answered
        *(((2.0, 3600.0 + delay_s), 3625.0 + delay_s, 3635.0 + delay_s) for delay_s in (0.0, 2.5, 5.0, 7.5)),
    ],
)
async def test_a_process_that_hangs_is_known_35_s_later_at_most(
    monkeypatch: pytest.MonkeyPatch, times: tuple[float, ...], least_s: float, most_s: float
) -> None:
    clock = Clock(monkeypatch)
    assert "no answer" in await until_hung("there", CHART_PROBE, asyncio.Event(), Process(clock, *times).ask)
    assert least_s <= clock.now_s <= most_s


async def test_a_port_on_which_nobody_listens_is_not_alive() -> None:
    assert not await is_alive("127.0.0.1:1", 5.0)

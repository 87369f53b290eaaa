"""An executor in virtual time: it computes nothing, and its steps take the time of a cost model."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from trunkline_bench.simulation.costs.step_work import StepWork, work_of
from trunkline_worker.step.plan import NO_MASKS, CopyEnd, Masks, Run, StepPlan, StepResult

END_TOKEN = 2  # ends a sequence that has reached the trace's output length
FIRST_TOKEN = 3
NO_VALUES: list[float] = []  # of a whole output


class StepCost(Protocol):
    """A cost model: the time of steps in seconds."""

    def step_time_s(self, work: StepWork) -> float:
        """The time of one step."""

    def run_times_s(self, work: StepWork, count: int) -> NDArray[np.float64]:
        """Times of `count` decode-only steps: `work` is the first, and every context grows by one token per step."""


@dataclass(slots=True)
class RepeatedPlan(StepPlan):
    """A step that is computed more than once, each time with the tokens that the time before sampled. Every entry has
    one new token."""

    repeats: int = 2


@dataclass(slots=True)
class RepeatedResult(StepResult):
    """The result of all repetitions of a plan but the last one, in order."""

    times_s: list[float] = field(default_factory=list)  # on the device
    done_s: list[float] = field(default_factory=list)  # when each was done
    repeated_token_ids: list[list[int]] = field(default_factory=list)  # for each entry, one of each repetition


class VirtualClock:
    """A clock that moves only when advance_to() is called."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def advance_to(self, time_s: float) -> None:
        self.now_s = max(self.now_s, time_s)


class SimulatedExecutor:
    """Runs steps one after another on one simulated device.

    output_lengths: number of tokens that each sequence generates, by id, the last one END_TOKEN. The scheduler does not
    know it, as with a real model. 0: the output is whole, a vector or a score.
    host_s: host time per step; overlaps with the device's time unless run_ahead is 0.
    """

    def __init__(
        self,
        cost: StepCost,
        clock: VirtualClock,
        output_lengths: Mapping[int, int],
        *,
        run_ahead: int = 1,
        host_s: float = 0.0,
    ) -> None:
        self.run_ahead = run_ahead
        self._cost = cost
        self._clock = clock
        self._output_lengths = output_lengths
        self._host_s = host_s
        self._left: dict[int, int] = {}  # tokens that a sequence will still generate, by id
        self._prefilling: set[int] = set()  # sequences that have sampled nothing since they started, by id
        self._free_s = 0.0  # when the device has finished all launched steps
        self._results: deque[tuple[StepResult, float]] = deque()
        self._costed: tuple[StepPlan, StepWork, float] | None = None  # the latest plan, its work and its time
        self._forwarded: tuple[StepPlan, float] | None = None  # a plan that needs the host, and when it began

    def launch(self, plan: StepPlan) -> None:
        left = self._left
        for sequence_id in plan.ended:
            del left[sequence_id]
            self._prefilling.discard(sequence_id)
        for start in plan.starts:
            generated = len(start.token_ids) - start.prompt_len
            left[start.sequence_id] = self._output_lengths[start.sequence_id] - generated
            self._prefilling.add(start.sequence_id)
        begin_s = max(self._clock.now_s, self._free_s)
        if isinstance(plan, RepeatedPlan):
            self._launch_run(plan, work_of(plan), begin_s)
            return
        if plan.needs_host:
            self._forwarded = plan, begin_s
        else:
            self._finish(plan, NO_MASKS, begin_s)

    def sample(self, masks: Masks) -> None:
        assert self._forwarded is not None, "a plan that needs the host was launched"
        (plan, begin_s), self._forwarded = self._forwarded, None
        self._finish(plan, masks, begin_s)

    def _finish(self, plan: StepPlan, masks: Masks, begin_s: float) -> None:
        """Samples, and adds the result of a step that begins then. The masks cost no time."""
        left, late = self._left, {index for index in plan.masked if index not in masks}
        _, device_s = self._cost_of(plan)
        tokens: list[int | None] = []
        runs: dict[int, list[int]] = {}
        wholes: dict[int, list[float]] = {}
        for index, step in enumerate(plan.steps):
            if index in plan.runs and index not in late:
                runs[index] = self._taken(step.sequence_id, plan.runs[index])
                tokens.append(None)
            elif step.samples and not self._output_lengths[step.sequence_id]:
                wholes[index] = NO_VALUES
                tokens.append(None)
            elif step.samples and index not in late:
                left[step.sequence_id] = still = left[step.sequence_id] - 1
                tokens.append(FIRST_TOKEN if still else END_TOKEN)
            else:
                tokens.append(None)
        if self._prefilling:
            self._prefilling.difference_update([step.sequence_id for step in plan.steps if step.samples])
        self._free_s = begin_s + self._elapsed_s(device_s)
        result = StepResult(plan.step_id, tokens, runs, wholes=wholes, device_time_s=device_s)
        result.copies = [CopyEnd(copy.copy_id, arrived=True) for copy in plan.copies]
        self._results.append((result, self._free_s))

    def _taken(self, sequence_id: int, run: Run) -> list[int]:
        """The tokens that a sequence gets by a run."""
        left = self._left[sequence_id]
        places = range(run.num_forced, run.num_forced + run.num_samples)
        found = run.taken([FIRST_TOKEN if place < left - 1 else END_TOKEN for place in places])
        self._left[sequence_id] -= len(found)
        return [token_id for token_id in found if token_id is not None]

    def is_done(self) -> bool:
        return bool(self._results) and self._results[0][1] <= self._clock.now_s

    @property
    def next_done_s(self) -> float:
        """When the oldest step that has not been collected ends; infinity if there is none."""
        return self._results[0][1] if self._results else float("inf")

    def collect(self) -> StepResult:
        result, done_s = self._results.popleft()
        self._clock.advance_to(done_s)
        return result

    def repeats(self, plan: StepPlan, most: int, until_s: float) -> int:
        """How many times in a row, at most `most`, the plan can be computed at once: up to the first end of a sequence,
        and so that no repetition would have been planned at `until_s` or later.

        The next repetition is planned when the one before is done or, running ahead, some time before: no later than
        that. A prompt computed token by token is no decode: once only.
        """
        done_s = max(self._clock.now_s, self._free_s)
        if done_s >= until_s or (
            self._prefilling and any([step.sequence_id in self._prefilling for step in plan.steps])
        ):
            return 1
        left = self._left
        most = min(most, min([left[step.sequence_id] for step in plan.steps]))
        work, device_s = self._cost_of(plan)
        if most <= 1 or done_s + self._elapsed_s(device_s) >= until_s:
            return 1
        count = 1
        for device_s in self._cost.run_times_s(work, most - 1).tolist():
            done_s += self._elapsed_s(device_s)
            if done_s >= until_s:
                break
            count += 1
        return count

    def _cost_of(self, plan: StepPlan) -> tuple[StepWork, float]:
        """The plan's work, and the device time of one repetition."""
        if self._costed is None or self._costed[0] is not plan:
            work = work_of(plan)
            self._costed = plan, work, self._cost.step_time_s(work)
        return self._costed[1:]

    def _launch_run(self, plan: RepeatedPlan, work: StepWork, begin_s: float) -> None:
        """Adds two results: one for all repetitions but the last, and one for the last."""
        device_s: list[float] = self._cost.run_times_s(work, plan.repeats).tolist()
        done_s: list[float] = []
        for time_s in device_s:
            begin_s += self._elapsed_s(time_s)
            done_s.append(begin_s)
        for step in plan.steps:
            self._left[step.sequence_id] -= plan.repeats
        self._free_s = done_s[-1]
        earlier = plan.repeats - 1
        first = RepeatedResult(
            plan.step_id,
            [],
            times_s=device_s[:-1],
            done_s=done_s[:-1],
            repeated_token_ids=[[FIRST_TOKEN] * earlier] * len(plan.steps),
        )
        tokens: list[int | None] = [FIRST_TOKEN if self._left[step.sequence_id] else END_TOKEN for step in plan.steps]
        self._results.append((first, done_s[-2]))
        self._results.append((StepResult(plan.step_id, tokens, device_time_s=device_s[-1]), done_s[-1]))

    def _elapsed_s(self, device_s: float) -> float:
        return max(device_s, self._host_s) if self.run_ahead else device_s + self._host_s

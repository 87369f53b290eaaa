"""The seam between the engine loop and what computes its steps."""

from typing import Protocol

from trunkline_worker.step.plan import StepPlan, StepResult


class Executor(Protocol):
    """Computes steps one after the other, in the order of their plans: on a device, or in simulation.

    A step may be launched while the ones before it still run; they are collected in the same order.
    """

    @property
    def run_ahead(self) -> int:
        """Steps that may have been launched, but not collected, when the next one is planned."""

    def launch(self, plan: StepPlan) -> None:
        """Starts a step: the model over the plan's tokens, then sampling. Returns at once where it can."""

    def is_done(self) -> bool:
        """Whether collect() would not have to wait."""

    def collect(self) -> StepResult:
        """The result of the oldest step that was launched and not collected; waits for it."""


class RepeatingExecutor(Executor, Protocol):
    """One that can foresee, in virtual time: it computes plans that repeat."""

    def repeats(self, plan: StepPlan, most: int, until_s: float) -> int:
        """How many times over, `most` at most, the plan can be computed in one go: up to the first end of a sequence,
        and such that no repetition would have been planned at `until_s` or later."""

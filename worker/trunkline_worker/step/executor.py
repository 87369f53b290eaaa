"""The interface between the engine loop and the executors that compute its steps."""

from typing import Protocol

from trunkline_worker.step.plan import StepPlan, StepResult


class Executor(Protocol):
    """Computes steps one after the other, in the order of their plans: on a device, or in simulation.

    A step may be launched while earlier ones still run; steps are collected in the same order.
    """

    @property
    def run_ahead(self) -> int:
        """How many steps may be in flight (launched and not collected) when the next one is planned."""

    def launch(self, plan: StepPlan) -> None:
        """Starts a step: the forward pass over the plan's tokens, then sampling. Returns at once if it can."""

    def is_done(self) -> bool:
        """Whether collect() would return at once."""

    def collect(self) -> StepResult:
        """Waits for the oldest step in flight, and returns its result."""

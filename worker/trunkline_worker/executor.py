"""The seam between the engine loop and what computes its steps."""

from typing import Protocol

from trunkline_worker.plan import StepPlan, StepResult


class Executor(Protocol):
    """Computes steps: on a device, or in simulation. One step at a time, in the order of their plans."""

    def forward(self, plan: StepPlan) -> None:
        """Runs the model over the plan's tokens and writes their KV."""

    def sample(self, plan: StepPlan) -> StepResult:
        """Samples from the logits of the forward pass just run; appends each sampled token to its row."""

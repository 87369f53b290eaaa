"""Runs a model's steps on a thread of its own, so that the engine loop can plan and answer meanwhile."""

import queue
import socket
import threading
import time
from dataclasses import replace
from typing import Protocol

from trunkline_worker.plan import StepPlan, StepResult


class StepRunner(Protocol):
    """What computes a step: see runner.TorchExecutor."""

    def forward(self, plan: StepPlan) -> None:
        """Runs the model over the plan's tokens and writes their KV."""

    def sample(self, plan: StepPlan) -> StepResult:
        """Samples from the logits of the forward pass just run; appends each sampled token to its row."""


class InlineExecutor:
    """Computes a step when its result is asked for. Nothing overlaps: for tests, and for devices that are the CPU."""

    def __init__(self, runner: StepRunner, run_ahead: int = 0) -> None:
        self._runner = runner
        self._plans: list[StepPlan] = []
        self.run_ahead = run_ahead

    def launch(self, plan: StepPlan) -> None:
        self._plans.append(plan)

    def is_done(self) -> bool:
        return False

    def collect(self) -> StepResult:
        return timed_step(self._runner, self._plans.pop(0))


class ThreadedExecutor:
    """Computes steps on one thread, in order. A failure there is raised by the collect() of its step."""

    def __init__(self, runner: StepRunner, run_ahead: int = 1) -> None:
        self._runner = runner
        self.run_ahead = run_ahead
        self._plans: queue.SimpleQueue[StepPlan] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[StepResult | BaseException] = queue.SimpleQueue()
        self._woken, self._wake = socket.socketpair()
        threading.Thread(target=self._run, name="steps", daemon=True).start()

    def launch(self, plan: StepPlan) -> None:
        self._plans.put(plan)

    def fileno(self) -> int:
        """Readable while a result is there to be collected: for select()."""
        return self._woken.fileno()

    def is_done(self) -> bool:
        return not self._results.empty()

    def collect(self) -> StepResult:
        result = self._results.get()
        self._woken.recv(1)
        if isinstance(result, BaseException):
            raise result
        return result

    def _run(self) -> None:
        while True:
            plan = self._plans.get()
            try:
                self._results.put(timed_step(self._runner, plan))
            except BaseException as error:  # the engine loop decides what becomes of it
                self._results.put(error)
            self._wake.send(b"\0")


def timed_step(runner: StepRunner, plan: StepPlan) -> StepResult:
    """One step and the time it took."""
    started_s = time.perf_counter()
    runner.forward(plan)
    result = runner.sample(plan)
    return replace(result, device_time_s=time.perf_counter() - started_s)

"""Ways to run a model's steps so that the engine loop can plan and answer meanwhile."""

import queue
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from trunkline_worker.step.plan import StepPlan, StepResult


class StepRunner(Protocol):
    """What computes a step: see torch_runner.TorchRunner and gpu.gpu_runner.GpuRunner."""

    @property
    def queues(self) -> bool:
        """Whether begin() returns before the step is done."""

    @property
    def later_bytes(self) -> int:
        """Device memory that is taken beside what the largest step of new sequences needs: by captured graphs, and by
        pieces of long contexts."""

    def begin(self, plan: StepPlan) -> Callable[[], StepResult]:
        """Runs the model over the plan's tokens, writes their KV, samples, and appends each sampled token to its row;
        or puts all that on a device's queue. What is returned waits for the result."""


class InlineExecutor:
    """Computes a step when its result is asked for. Nothing overlaps: for tests, and for devices that are the CPU."""

    def __init__(self, runner: StepRunner, run_ahead: int = 0) -> None:
        self._runner = runner
        self._plans: deque[StepPlan] = deque()
        self.run_ahead = run_ahead

    def launch(self, plan: StepPlan) -> None:
        self._plans.append(plan)

    def is_done(self) -> bool:
        return False

    def collect(self) -> StepResult:
        return timed_step(self._runner, self._plans.popleft())


class WaitingExecutor:
    """A thread waits for results, in order. What goes wrong with a step is raised by its collect()."""

    def __init__(self, run_ahead: int) -> None:
        self.run_ahead = run_ahead
        self._results: queue.SimpleQueue[StepResult | BaseException] = queue.SimpleQueue()
        self._woken, self._wake = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="steps", daemon=True)
        self._thread.start()

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

    def close(self) -> None:
        """Ends the thread, which keeps the runner alive; nothing may be under way."""
        self._end()
        self._thread.join()
        self._woken.close()
        self._wake.close()

    def _run(self) -> None:
        while True:
            try:
                result = self._next()
                if result is None:
                    return
                self._results.put(result)
            except BaseException as error:  # the engine loop decides what becomes of it
                self._results.put(error)
            self._wake.send(b"\0")

    def _next(self) -> StepResult | None:
        """The next result; waits for it. None after _end()."""
        raise NotImplementedError

    def _end(self) -> None:
        """Has _next() return None, after all else."""
        raise NotImplementedError


class ThreadedExecutor(WaitingExecutor):
    """Computes steps on the thread: for a CPU that is to plan meanwhile."""

    def __init__(self, runner: StepRunner, run_ahead: int = 1) -> None:
        self._runner = runner
        self._plans: queue.SimpleQueue[StepPlan | None] = queue.SimpleQueue()
        super().__init__(run_ahead)

    def launch(self, plan: StepPlan) -> None:
        self._plans.put(plan)

    def _end(self) -> None:
        self._plans.put(None)

    def _next(self) -> StepResult | None:
        plan = self._plans.get()
        return None if plan is None else timed_step(self._runner, plan)


class QueueingExecutor(WaitingExecutor):
    """Puts steps on a device's queue as they are launched; the thread sleeps until the device is done with one."""

    def __init__(self, runner: StepRunner, run_ahead: int = 1) -> None:
        self._runner = runner
        self._begun: queue.SimpleQueue[Callable[[], StepResult] | BaseException | None] = queue.SimpleQueue()
        super().__init__(run_ahead)

    def launch(self, plan: StepPlan) -> None:
        try:
            self._begun.put(self._runner.begin(plan))
        except BaseException as error:
            self._begun.put(error)

    def _end(self) -> None:
        self._begun.put(None)

    def _next(self) -> StepResult | None:
        begun = self._begun.get()
        if isinstance(begun, BaseException):
            raise begun
        return None if begun is None else begun()


def timed_step(runner: StepRunner, plan: StepPlan) -> StepResult:
    """One step and the time it took."""
    started_s = time.perf_counter()
    result = runner.begin(plan)()
    return replace(result, device_time_s=time.perf_counter() - started_s)

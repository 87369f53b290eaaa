"""Executors: they run a model's steps for the engine loop."""

import queue
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from trunkline_worker.step.plan import NO_MASKS, Masks, StepPlan, StepResult

DONE, MASKS = b"d", b"m"  # what wakes the loop: a step is done, or needs its masks


class StepRunner(Protocol):
    """Computes steps; implemented by torch_runner.TorchRunner and gpu.gpu_runner.GpuRunner."""

    @property
    def queues(self) -> bool:
        """Whether begin() returns before the step is computed."""

    @property
    def later_bytes(self) -> int:
        """Bytes of device memory for captured graphs and for pieces of long contexts, which come on top of what the
        largest step of new sequences needs."""

    def begin(self, plan: StepPlan) -> Callable[[], StepResult]:
        """Computes both parts of a step that does not need the host, or puts them on a device's queue. Returns a
        function that waits for the result."""

    def forward(self, plan: StepPlan) -> None:
        """The first part: runs the model over the plan's tokens, and writes their KV. sample() must follow."""

    def sample(self, plan: StepPlan, masks: Masks) -> Callable[[], StepResult]:
        """The second part: samples, and appends each sampled token to its row. Returns a function that waits for the
        result."""

    def forget(self, sequence_ids: list[int]) -> None:
        """Drops rows, as a plan's `ended` does, without a step."""


class InlineExecutor:
    """Computes a step in collect(), so that nothing overlaps but the first part of a lone step with what makes its
    masks: launch() computes it. For an engine whose caller has nothing else to do meanwhile."""

    def __init__(self, runner: StepRunner, run_ahead: int = 0) -> None:
        self._runner = runner
        self._plans: deque[StepPlan] = deque()
        self._masks = NO_MASKS  # of the one plan that may need them
        self._forward_s: float | None = None  # of the oldest plan; None: its first part is not computed yet
        self.run_ahead = run_ahead

    def launch(self, plan: StepPlan) -> None:
        self._plans.append(plan)
        if plan.needs_host and len(self._plans) == 1:
            self._forward_s = timed_forward(self._runner, plan)

    def sample(self, masks: Masks) -> None:
        self._masks = masks

    def is_done(self) -> bool:
        return False

    def collect(self) -> StepResult:
        plan = self._plans.popleft()
        forward_s, self._forward_s = self._forward_s, None
        if forward_s is None:
            return timed_step(self._runner, plan, lambda: self._masks)
        return timed_sample(self._runner, plan, self._masks, forward_s)

    def on_thread(self) -> "ThreadedExecutor":
        """An executor that computes the runner's steps on a thread. None may be in flight."""
        return ThreadedExecutor(self._runner, self.run_ahead)


class WaitingExecutor:
    """Waits for results, in order, on a thread. An exception of a step is raised by its collect()."""

    def __init__(self, run_ahead: int) -> None:
        self.run_ahead = run_ahead
        self._results: queue.SimpleQueue[StepResult | BaseException] = queue.SimpleQueue()
        self._woken, self._wake = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="steps", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        """Returns a file descriptor for select(), readable while a result can be collected or a step asks for masks."""
        return self._woken.fileno()

    def is_done(self) -> bool:
        return not self._results.empty()

    def collect(self) -> StepResult:
        result = self._results.get()
        while self._woken.recv(1) != DONE:
            pass
        if isinstance(result, BaseException):
            raise result
        return result

    def close(self) -> None:
        """Ends the thread, which keeps the runner alive. No step may be in flight."""
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
            except BaseException as error:  # the engine loop handles it
                self._results.put(error)
            self._wake.send(DONE)

    def _next(self) -> StepResult | None:
        """Waits for the next result and returns it; None after _end()."""
        raise NotImplementedError

    def _end(self) -> None:
        """Makes _next() return None after all results."""
        raise NotImplementedError


class ThreadedExecutor(WaitingExecutor):
    """Computes steps on the thread, so that the engine loop goes on meanwhile. For models on the CPU."""

    def __init__(self, runner: StepRunner, run_ahead: int = 1) -> None:
        self._runner = runner
        self.asks_for_masks = False  # the first part of a step is done, and its masks have not been given
        self._plans: queue.SimpleQueue[StepPlan | None] = queue.SimpleQueue()
        self._masks: queue.SimpleQueue[Masks] = queue.SimpleQueue()
        super().__init__(run_ahead)

    def launch(self, plan: StepPlan) -> None:
        self.asks_for_masks = False  # the masks of the step before may have been given just before it asked
        self._plans.put(plan)

    def sample(self, masks: Masks) -> None:
        if self.asks_for_masks:
            self.asks_for_masks = False
            self._woken.recv(1)
        self._masks.put(masks)

    def _end(self) -> None:
        self._plans.put(None)

    def _next(self) -> StepResult | None:
        plan = self._plans.get()
        return None if plan is None else timed_step(self._runner, plan, self._given_masks)

    def _given_masks(self) -> Masks:
        """Waits for the masks of a step. Where the loop has nothing else to do than to wait for it, wakes the loop."""
        if self.run_ahead:
            return self._masks.get()
        try:
            return self._masks.get_nowait()
        except queue.Empty:
            self._wake.send(MASKS)
            self.asks_for_masks = True
            return self._masks.get()


class QueueingExecutor(WaitingExecutor):
    """Puts steps on a device's queue as they are launched; the thread sleeps until the device has finished one."""

    def __init__(self, runner: StepRunner, run_ahead: int = 1) -> None:
        self._runner = runner
        self._begun: queue.SimpleQueue[Callable[[], StepResult] | BaseException | None] = queue.SimpleQueue()
        self._forwarded: StepPlan | None = None  # its second part has not begun
        super().__init__(run_ahead)

    def launch(self, plan: StepPlan) -> None:
        try:
            if plan.needs_host:
                self._runner.forward(plan)
                self._forwarded = plan
            else:
                self._begun.put(self._runner.begin(plan))
        except BaseException as error:
            self._begun.put(error)

    def sample(self, masks: Masks) -> None:
        plan, self._forwarded = self._forwarded, None
        if plan is None:
            return  # its first part has failed: collect() raises the exception
        try:
            self._begun.put(self._runner.sample(plan, masks))
        except BaseException as error:
            self._begun.put(error)

    def _end(self) -> None:
        self._begun.put(None)

    def _next(self) -> StepResult | None:
        begun = self._begun.get()
        if isinstance(begun, BaseException):
            raise begun
        return None if begun is None else begun()


def timed_step(runner: StepRunner, plan: StepPlan, masks: Callable[[], Masks] = dict) -> StepResult:
    """Runs one step, and returns its result with the time that it took.

    masks: waits for the masks of a plan that needs them; this time does not count
    """
    if not plan.needs_host:
        started_s = time.perf_counter()
        result = runner.begin(plan)()
        return replace(result, device_time_s=time.perf_counter() - started_s)
    forward_s = timed_forward(runner, plan)
    return timed_sample(runner, plan, masks(), forward_s)


def timed_forward(runner: StepRunner, plan: StepPlan) -> float:
    """Runs the first part of a step, and returns the time that it took."""
    started_s = time.perf_counter()
    runner.forward(plan)
    return time.perf_counter() - started_s


def timed_sample(runner: StepRunner, plan: StepPlan, masks: Masks, forward_s: float) -> StepResult:
    """Runs the second part of a step, and returns its result with the time that both took."""
    started_s = time.perf_counter()
    result = runner.sample(plan, masks)()
    return replace(result, device_time_s=forward_s + time.perf_counter() - started_s)

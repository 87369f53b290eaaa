"""Watches a connected worker: detects that it hangs or recovers, and sets its share of requests after a start."""

import asyncio

import grpc

from trunkline_router.workers.connected_worker import ConnectedWorker, WorkerCalls
from trunkline_router.workers.health import Liveness, longest_silence_s, slow_start_share
from trunkline_router.workers.link_context import LinkContext
from trunkline_runtime.log import get_logger


class WorkerHealth:
    """Detects that a worker hangs and that it is back, and lets it start slowly."""

    def __init__(self, worker: ConnectedWorker, calls: WorkerCalls, context: LinkContext) -> None:
        self._worker = worker
        self._calls = calls
        self._context = context
        self._liveness = self._new_liveness()
        self._granted_liveness = self._new_liveness()
        self._messages_when_hung = 0
        self._started_s = self._checked_s = context.clock_s()
        self._log = get_logger()

    async def look_after(self) -> None:
        """Watches the worker until it is cancelled."""
        clock_s, slow_start_s = self._context.clock_s, self._context.limits.slow_start_s
        while True:
            self._worker.take_share(slow_start_share(clock_s() - self._started_s, slow_start_s))
            await asyncio.sleep(self._liveness.check_interval_s)
            now_s, num_messages = clock_s(), self._worker.num_messages
            self._worker.watched_s += min(now_s - self._checked_s, 2 * self._liveness.check_interval_s)
            self._checked_s = now_s
            self._worker.may_be_silent_s = self._liveness.timeout_s + self._allowance_s
            if self._worker.is_hung and num_messages != self._messages_when_hung:
                self._is_back(now_s)
            elif await self._is_silent(now_s, num_messages) and not self._worker.is_hung:
                self._hangs(num_messages)

    @property
    def _allowance_s(self) -> float:
        return longest_silence_s(self._worker.model, self._worker.load.step_cost)

    async def _is_silent(self, now_s: float, num_messages: int) -> bool:
        worker, allowance_s = self._worker, self._allowance_s
        has_work = worker.session.num_open > 0
        is_silent = self._liveness.is_silent(
            now_s, num_messages=num_messages, has_work=has_work, allowance_s=allowance_s
        )
        # A granted request may never reach the worker, so the worker is asked before it counts as hung.
        is_granted = worker.granted_choices > 0
        if self._granted_liveness.is_silent(
            now_s, num_messages=num_messages, has_work=is_granted, allowance_s=allowance_s
        ):
            self._granted_liveness = self._new_liveness()
            is_silent |= not (worker.is_hung or await self._answers() or worker.num_messages != num_messages)
        return is_silent

    async def _answers(self) -> bool:
        """Whether the worker's engine answers, which it does between two steps."""
        try:
            await self._calls.stats(self._context.limits.inter_token_timeout_s)
        except grpc.aio.AioRpcError as error:
            return error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED  # the session notices other errors
        return True

    def _hangs(self, num_messages: int) -> None:
        worker = self._worker
        worker.is_hung = True
        worker.hangs += 1
        self._messages_when_hung = num_messages
        self._log.error("worker hangs", address=worker.address, choices=worker.session.num_open)
        self._context.on_change()
        worker.session.give_up(f"the worker has sent nothing for {self._liveness.timeout_s:g} s")

    def _is_back(self, now_s: float) -> None:
        self._worker.is_hung = False
        self._worker.comebacks += 1
        self._started_s = now_s
        self._log.info("worker is back", address=self._worker.address)
        self._context.on_change()

    def _new_liveness(self) -> Liveness:
        return Liveness(self._context.limits.inter_token_timeout_s)

"""Stops and resumes the front's admission of requests, and sets the worker's health status accordingly."""

from collections.abc import Awaitable, Callable

from trunkline.status import no_worker
from trunkline.v1.worker_pb2 import DrainResponse
from trunkline_worker.front.front import Front


class Draining:
    """Drains a worker, and ends drains.

    set_ready: sets the health status of readiness
    is_stopping: whether the process has been told to stop
    timeout_s: for running requests to finish, if a drain is not given another one
    """

    def __init__(
        self,
        front: Front,
        set_ready: Callable[[bool], Awaitable[None]],
        is_stopping: Callable[[], bool],
        timeout_s: float,
    ) -> None:
        self._front = front
        self._set_ready = set_ready
        self._is_stopping = is_stopping
        self._timeout_s = timeout_s

    async def drain(self, timeout_s: float | None = None) -> DrainResponse:
        """Stops admission, and returns when no running request is left, the timeout has passed, or undrain() was
        called."""
        draining = self._front.drain(self._timeout_s if timeout_s is None else timeout_s)
        await self._set_ready(False)
        drained = await draining
        return DrainResponse(finished=drained.finished, aborted=drained.aborted)

    async def undrain(self) -> None:
        """Resumes admission. Raises RequestRefused (NO_WORKER) if the worker is stopping."""
        if self._is_stopping() or self._front.dead.is_set():
            raise no_worker("this worker is stopping: it takes requests again once it has been started again")
        self._front.undrain()
        await self._set_ready(True)

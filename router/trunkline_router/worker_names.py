"""Workers that are known by several names: 127.0.0.1 and localhost, a pod's name and its address.

A worker is one worker by whichever name it is reached: its requests, its cache and its load are counted once.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from trunkline.v1.worker_pb2 import GetModelResponse

if TYPE_CHECKING:
    from trunkline_router.worker_link import WorkerLink


class SameWorker(Exception):
    """Another link has this worker already. One line for a person."""

    def __init__(self, holder: "WorkerLink") -> None:
        super().__init__(f"the same worker as {holder.address}")
        self.holder = holder


class WorkerNames:
    """Which of a router's links has which life of a worker; a worker's epoch is drawn anew at each start."""

    def __init__(self) -> None:
        self._holders: dict[tuple[str, int], WorkerLink] = {}

    @contextmanager
    def held(self, model: GetModelResponse, link: "WorkerLink") -> Iterator[None]:
        """The worker is this link's, in here. Raises SameWorker."""
        life = model.worker_id, model.epoch
        if life in self._holders:
            raise SameWorker(self._holders[life])
        self._holders[life] = link
        try:
            yield
        finally:
            del self._holders[life]

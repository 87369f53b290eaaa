"""What has happened to a worker since the router learned of it, over all its connections."""

from dataclasses import dataclass

from trunkline_router.workers.connected_worker import ConnectedWorker


@dataclass(slots=True)
class WorkerTotals:
    """Counts that only grow.

    promised_tokens: prompt tokens that the index promised; found_tokens: those of them that were in the worker's cache
    """

    connections: int = 0
    losses: int = 0
    hangs: int = 0
    promised_tokens: int = 0
    found_tokens: int = 0

    def add(self, worker: ConnectedWorker) -> None:
        """Adds the counts of one connection, which has ended."""
        self.hangs += worker.hangs
        self.promised_tokens += worker.accuracy.promised_so_far
        self.found_tokens += worker.accuracy.found_so_far

    def with_present(self, worker: ConnectedWorker | None) -> "WorkerTotals":
        """The totals, with those of the present connection if there is one."""
        made = WorkerTotals(self.connections, self.losses, self.hangs, self.promised_tokens, self.found_tokens)
        if worker is not None:
            made.add(worker)
        return made

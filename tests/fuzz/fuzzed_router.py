"""A router in a process of its own, so that a fuzzer sees it crash, grow or hang.

usage: python -m tests.fuzz.fuzzed_router

Prints its ports as JSON. Then it answers each line of its input with its state, as JSON. It ends with its input.
"""

import asyncio
import gc
import json
import logging
import os
import resource
import sys
import time
from collections.abc import MutableMapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import structlog

from tests.fuzz.scoring_worker import ScoringWorker
from tests.router.cluster import Cluster, cluster
from trunkline.v1.worker_pb2 import Capability
from trunkline_router.edge.http_call import Edge
from trunkline_router.edge.responses.response_store import ResponseStore, StoreLimits

STORED, STORED_BYTES = 50, 1 << 20
GRANT_KEY = b"a key for tests, of thirty-two bytes"
MAX_PROBLEMS, PROBLEM_CHARACTERS = 5, 2000
ERROR_LEVELS = ("error", "critical", "exception")


@dataclass(frozen=True, slots=True)
class State:
    """What must not grow, and what must not be.

    files: open file descriptors, sockets among them
    problems: what was logged at error level, and exceptions that were not caught, since the last time
    """

    open_requests: int
    held_bytes: int
    http_connections: int
    open_choices: int
    queued_tokens: int
    files: int
    rss_mib: float
    problems: list[str]


class Problems(logging.Handler):
    """Collects what is logged at error level by structlog, the standard library and the event loop."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.seen: list[str] = []

    def add(self, problem: str) -> None:
        if len(self.seen) < MAX_PROBLEMS:
            self.seen.append(problem[-PROBLEM_CHARACTERS:])

    def emit(self, record: logging.LogRecord) -> None:
        self.add(logging.Formatter().format(record))

    def of_event(self, _: Any, method: str, event: MutableMapping[str, Any]) -> Any:
        """A processor of structlog."""
        if method in ERROR_LEVELS:
            self.add(str(structlog.processors.format_exc_info(None, method, dict(event))))
        raise structlog.DropEvent

    def taken(self) -> list[str]:
        taken, self.seen = self.seen, []
        return taken


def state_of(router: Cluster, problems: Problems) -> State:
    gc.collect()
    workers = [link.worker for link in router.links if link.worker is not None]
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return State(
        open_requests=router.gate.requests.num_held,
        held_bytes=router.gate.held.num_held,
        http_connections=router.http.num_connections if router.http is not None else 0,
        open_choices=sum(worker.open_choices + worker.session.num_open for worker in workers),
        queued_tokens=sum(worker.queued_tokens for worker in workers),
        files=len(os.listdir("/proc/self/fd")),
        rss_mib=pages * resource.getpagesize() / (1 << 20),
        problems=problems.taken(),
    )


async def main() -> None:
    problems = Problems()
    logging.getLogger().addHandler(problems)
    structlog.configure(processors=[problems.of_event])
    asyncio.get_running_loop().set_exception_handler(lambda _, context: problems.add(str(context)))
    sys.unraisablehook = lambda unraisable: problems.add(f"{unraisable.exc_value!r} in {unraisable.object!r}")
    store = ResponseStore(StoreLimits(STORED, STORED_BYTES, 60.0), time.monotonic)
    able = (
        Capability.CAPABILITY_GRAMMARS,
        Capability.CAPABILITY_VECTORS,
        Capability.CAPABILITY_SCORES,
    )
    worker = ScoringWorker("w0", answer=None, grant_key=GRANT_KEY, capabilities=able)
    async with cluster(worker, max_choices=16, edge=Edge, store=store, grant_key=GRANT_KEY) as router:
        print(json.dumps({"http_port": router.http_port, "grpc_port": router.port}), flush=True)
        while await asyncio.to_thread(sys.stdin.readline):
            print(json.dumps(asdict(state_of(router, problems))), flush=True)


if __name__ == "__main__":
    asyncio.run(main())

"""Drains a worker for an operator, or puts it back into service."""

import asyncio

import grpc

from trunkline.status import CODE_NOT_FOUND, WORKER_NOT_FOUND, RequestRefused, invalid, no_worker
from trunkline.v1 import fleet_pb2
from trunkline.v1.fleet_pb2 import DrainWorkerResponse, UndrainWorkerResponse
from trunkline_router.observe.watch.worker_tile import SHOWN
from trunkline_router.workers.connected_worker import ConnectedWorker, WorkerCalls
from trunkline_router.workers.pool import Pools
from trunkline_router.workers.worker_link import WorkerLink, state_of
from trunkline_runtime.log import get_logger

BEGINS_WITHIN_S = 5.0  # a drain or its end
MOST_TIMEOUT_S = 86400.0
MOST_PROBLEM = 200  # characters: some are a worker's words


class WorkerDrain:
    """Drains workers, and ends drains. The calls of drains go on in the background."""

    def __init__(self, pools: Pools) -> None:
        self._pools = pools
        self._drains: dict[str, asyncio.Task[str]] = {}  # by address

    async def drain(self, name: str, timeout_s: float | None, by: str) -> DrainWorkerResponse:
        """Drains the worker with this name or address. Returns when it takes no new requests.

        by: the identity that asks, for the log

        Raises RequestRefused: WORKER_NOT_FOUND, INVALID_REQUEST, or NO_WORKER if the worker is not connected or does
        not begin to drain.
        """
        if timeout_s is not None and not 0 <= timeout_s <= MOST_TIMEOUT_S:
            raise invalid("timeout", f"must be in [0, {MOST_TIMEOUT_S:g}] seconds")
        link, worker, calls = self._connected(name)
        get_logger().warning("a drain was asked for", worker=worker.worker_id, address=link.address, by=by)
        self._drains = {address: drain for address, drain in self._drains.items() if not drain.done()}
        drain = self._drains.get(link.address)
        if drain is None:
            drain = self._drains[link.address] = asyncio.create_task(_drained(link.address, calls, timeout_s))
        try:
            async with asyncio.timeout(BEGINS_WITHIN_S):
                while link.worker is worker and not worker.load.draining and not drain.done():
                    changed = asyncio.create_task(self._pools.change().wait())
                    try:
                        await asyncio.wait({changed, drain}, return_when=asyncio.FIRST_COMPLETED)
                    finally:
                        changed.cancel()
        except TimeoutError:
            raise no_worker(f"worker {name[:128]!r} has not begun to drain within {BEGINS_WITHIN_S:g} s") from None
        if drain.done() and not worker.load.draining and (problem := drain.result()):
            raise no_worker(f"worker {name[:128]!r} did not drain: {problem}")
        # An idle worker has drained before its load sample says so.
        is_lost = link.worker is not worker
        state = fleet_pb2.WORKER_STATE_CONNECTING if is_lost else fleet_pb2.WORKER_STATE_DRAINING
        return DrainWorkerResponse(worker_id=worker.worker_id, address=link.address, state=state)

    async def undrain(self, name: str, by: str) -> UndrainWorkerResponse:
        """Ends the drain of the worker with this name or address, however it was begun. Returns when this router sends
        it requests again.

        by: the identity that asks, for the log

        Raises RequestRefused: WORKER_NOT_FOUND, or NO_WORKER if the worker is not connected, is stopping, or does not
        take requests again.
        """
        link, worker, calls = self._connected(name)
        get_logger().warning("the end of a drain was asked for", worker=worker.worker_id, address=link.address, by=by)
        try:
            async with asyncio.timeout(BEGINS_WITHIN_S):
                await calls.undrain(BEGINS_WITHIN_S)
                while link.worker is worker and worker.load.draining:
                    await self._pools.change().wait()
        except (grpc.aio.AioRpcError, TimeoutError) as error:
            raise no_worker(f"worker {name[:128]!r} is not back in service: {_problem(error)}") from None
        self._drains.pop(link.address, None)  # its drain is over, though the answer may still be on its way
        return UndrainWorkerResponse(worker_id=worker.worker_id, address=link.address, state=SHOWN[state_of(link)])

    def _connected(self, name: str) -> tuple[WorkerLink, ConnectedWorker, WorkerCalls]:
        """The link with this address, else the one whose worker says that this is its name: it may say an address.
        Raises RequestRefused (WORKER_NOT_FOUND, NO_WORKER)."""
        links = self._pools.links
        named = [link for link in links if link.model is not None and name == link.model.worker_id]
        found = [*(link for link in links if name == link.address), *named]
        if not name or not found:
            raise RequestRefused(CODE_NOT_FOUND, WORKER_NOT_FOUND, f"no worker {name[:128]!r} is known here")
        link = found[0]
        if link.worker is None or link.calls is None:
            raise no_worker(f"worker {name[:128]!r} is not connected")
        return link, link.worker, link.calls


async def _drained(address: str, calls: WorkerCalls, timeout_s: float | None) -> str:
    """Drains a worker, which may take hours. Returns why the end was not seen, "" if it was."""
    try:
        done = await calls.drain(timeout_s)
    except grpc.aio.AioRpcError as error:
        get_logger().warning("the end of a worker's drain was not seen", address=address, problem=error.code().name)
        return str(error.code().name)
    get_logger().info("worker has drained", address=address, finished=done.finished, aborted=done.aborted)
    return ""


def _problem(error: grpc.aio.AioRpcError | TimeoutError) -> str:
    """Why a worker did not end its drain."""
    if isinstance(error, TimeoutError):
        return f"its drain has not ended within {BEGINS_WITHIN_S:g} s"
    if error.code() is grpc.StatusCode.UNIMPLEMENTED:
        return "it is of an earlier version, whose drain lasts until it is started again"
    return f"{error.code().name}: {(error.details() or '')[:MOST_PROBLEM]}"

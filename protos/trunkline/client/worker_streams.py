"""A direct client's connections to workers and the streams of its choices."""

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc

from trunkline.channel import KEEPALIVE_OPTIONS, MESSAGE_OPTIONS
from trunkline.errors import TrunklineError, error_of
from trunkline.status import FORBIDDEN, NO_WORKER, OVERLOADED
from trunkline.tls import ClientTls, open_channel
from trunkline.v1.generation_pb2 import RequestError
from trunkline.v1.worker_pb2 import Grant, WorkerServiceGenerateRequest, WorkerServiceGenerateResponse
from trunkline.v1.worker_pb2_grpc import WorkerServiceStub

CONNECT_MS = 5_000
MAX_IDLE_CHANNELS = 64  # to workers without a request of this client
MAX_WAITING = 64  # unread responses; beyond it the client stops reading from the workers

# Status codes of a call whose stream broke, as opposed to one that was refused.
BROKEN = {
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.INTERNAL,
}

Arrived = asyncio.Queue[WorkerServiceGenerateResponse | Exception]  # an exception: a stream broke


class Lost(Exception):
    """The worker gave the answer up; another worker may continue it.  refusal: the worker's error, if it sent one"""

    def __init__(self, problem: str, refusal: RequestError | None = None) -> None:
        super().__init__(problem)
        self.refusal = refusal


class _Connection:
    def __init__(self, address: str, tls: ClientTls | None) -> None:
        self.channel = open_channel(
            address,
            (
                *MESSAGE_OPTIONS,
                *KEEPALIVE_OPTIONS,
                ("grpc.http2.max_pings_without_data", 0),
                ("grpc.min_reconnect_backoff_ms", CONNECT_MS),
                ("grpc.use_local_subchannel_pool", 1),
                ("grpc.enable_retries", 0),
            ),
            tls,
        )
        self.stub: Any = WorkerServiceStub(self.channel)
        self.users = 0


class Workers:
    """Connections to workers by address, least recently used first.  tls: of new connections; None: plaintext"""

    def __init__(self, tls: ClientTls | None = None) -> None:
        self._tls = tls
        self._connections: OrderedDict[str, _Connection] = OrderedDict()

    @asynccontextmanager
    async def at(self, address: str) -> AsyncIterator[Any]:
        """A stub of the worker at an address. Raises TlsFileError."""
        connection = self._connections.pop(address, None) or _Connection(address, self._tls)
        self._connections[address] = connection
        connection.users += 1
        try:
            yield connection.stub
        except Lost as lost:
            # The worker did not answer. The next request must connect at once, not after this connection's back-off.
            if lost.refusal is None and self._connections.get(address) is connection:
                del self._connections[address]
            raise
        finally:
            connection.users -= 1
            if self._connections.get(address) is not connection and not connection.users:
                await connection.channel.close()
            await self._trim()

    async def close(self) -> None:
        connections, self._connections = self._connections, OrderedDict()
        await asyncio.gather(*(connection.channel.close() for connection in connections.values()))

    async def _trim(self) -> None:
        idle = [address for address, connection in self._connections.items() if not connection.users]
        gone = [self._connections.pop(address) for address in idle[: max(0, len(idle) - MAX_IDLE_CHANNELS)]]
        await asyncio.gather(*(connection.channel.close() for connection in gone))


def time_left_s(deadline_s: float | None) -> float | None:
    """Time until a deadline on the monotonic clock, at least 0; None if there is no deadline."""
    return None if deadline_s is None else max(0.0, deadline_s - time.monotonic())


@asynccontextmanager
async def streams(stub: Any, grants: Sequence[Grant], deadline_s: float | None) -> AsyncIterator[Arrived]:
    """A queue of what arrives on the choices' streams, in order of arrival. If a stream breaks, its error is queued."""
    left_s = time_left_s(deadline_s)
    arrived: Arrived = asyncio.Queue(MAX_WAITING)
    calls = [stub.Generate(WorkerServiceGenerateRequest(grant=grant), timeout=left_s) for grant in grants]
    readers = [asyncio.create_task(_read(call, arrived)) for call in calls]
    try:
        yield arrived
    finally:
        for call in calls:
            call.cancel()
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)


async def _read(call: Any, arrived: Arrived) -> None:
    problem: Exception = Lost("the worker ended the stream before the answer")
    try:
        async for item in call:
            await arrived.put(item)
            if item.chunk.finish_reason:
                return
    except grpc.aio.AioRpcError as error:
        problem = _problem(error)
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        problem = TrunklineError("the client was closed")  # which closed the channel
    await arrived.put(problem)


def _problem(error: grpc.aio.AioRpcError) -> TrunklineError | Lost:
    """The error for a worker's refusal or a broken stream: Lost if another worker can continue."""
    refused = error_of(error)
    if refused.reason in (NO_WORKER, OVERLOADED, FORBIDDEN):  # FORBIDDEN: it restarted, or the grant expired
        retry_delay_ms = int((refused.retry_after_s or 0) * 1e3)
        return Lost(str(refused), RequestError(reason=refused.reason, retry_delay_ms=retry_delay_ms))
    if not refused.reason and error.code() in BROKEN:
        return Lost(str(refused))
    return refused

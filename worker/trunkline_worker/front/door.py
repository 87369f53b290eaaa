"""Admits calls to a worker before their requests are read: checks callers, and bounds the calls of each kind.

The requests that are read at once are bounded as well. Unread data stays with its client, except a stream's window.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc

from trunkline.grant import GrantKeys
from trunkline.proof import check_proof
from trunkline.protocol import MAX_SUBMITS_BYTES
from trunkline.status import CODE_RESOURCE_EXHAUSTED, OVERLOADED, RequestRefused, forbidden, invalid
from trunkline.v1.worker_pb2 import GetModelResponse
from trunkline_runtime.log import get_logger
from trunkline_worker.front.service import SERVICE
from trunkline_worker.front.session import MAX_ABORT_BYTES, MAX_SUBMITS
from trunkline_worker.front.submit_size import check_generate, most_submit_bytes

QUIET_MS = 60_000  # between two log lines on refused calls, because any host may cause any number of them

Context = grpc.aio.ServicerContext[Any, Any]
RETRY_MS = 1000
PER_CONNECTION = 8  # at once; the connection's other calls wait
# Only routers and operators may call these, if the worker can tell callers apart.
GATED = ("Session", "WatchCache", "GetStats", "Drain", "Undrain")
BY_ROUTERS = ("Session", "WatchCache")
# Direct calls allowed on top of twice those that can wait or run: calls that have only sent headers, or are ending.
OTHER_CALLS = 1024
HOST_SHARE = 0.75  # largest share of the direct calls for one host
UPLOAD_BYTES = 512 << 20  # being read at once, over all calls except sessions and reflection
SMALL_REQUEST_BYTES = 64 << 10  # longest request of a method that takes no submit
# Their messages arrive for as long as the call lasts, so waiting for one must not occupy a place among the uploads.
STREAMS = ("Session", "ServerReflectionInfo")
HEALTH_CHECK = "/grpc.health.v1.Health/Check"
# Of a caller's certificate, which the server has verified (mTLS).
ALTERNATIVE_NAMES, COMMON_NAME = "x509_subject_alternative_name", "x509_common_name"


def names_of(context: Context) -> frozenset[str]:
    """The subject alternative names of the caller's certificate: DNS names, URIs, e-mail and IP addresses. Its common
    name if it has none of them, as RFC 6125 orders. Empty for callers without a certificate."""
    given = context.auth_context()
    names = given.get(ALTERNATIVE_NAMES) or given.get(COMMON_NAME) or ()
    return frozenset(name.decode("utf-8", "replace") for name in names)


class CallAuthorizer:
    """Checks the proofs and certificates of calls.

    keys: without any, calls need no proof
    now_unix_ms: the clock of proofs
    router_names: names in the certificates of routers and operators; if empty, certificates' names are not checked
    """

    def __init__(
        self,
        keys: GrantKeys,
        worker_id: str,
        epoch: int,
        now_unix_ms: Callable[[], int],
        router_names: frozenset[str] = frozenset(),
    ) -> None:
        self._keys = keys
        self._worker_id = worker_id
        self._epoch = epoch
        self._now_unix_ms = now_unix_ms
        self._router_names = router_names
        self._told_unix_ms: int | None = None

    @property
    def knows_routers(self) -> bool:
        """Whether only routers and operators pass check()."""
        return bool(self._keys or self._router_names)

    def check(self, method: str, context: Context) -> None:
        """Raises RequestRefused if the caller is not a router or an operator: UNAUTHENTICATED if its metadata has no
        valid proof for this method, FORBIDDEN if its certificate has none of the names."""
        now_unix_ms = self._now_unix_ms()
        try:
            self._check_name(method, context)
            check_proof(
                self._keys,
                method,
                context.invocation_metadata(),
                worker_id=self._worker_id,
                epoch=self._epoch,
                now_unix_ms=now_unix_ms,
            )
        except RequestRefused as refused:
            if self._told_unix_ms is None or now_unix_ms - self._told_unix_ms >= QUIET_MS:
                self._told_unix_ms = now_unix_ms
                get_logger().warning("call refused", method=method, problem=refused.message)
            raise

    def check_generate(self, context: Context) -> None:
        """Raises RequestRefused (FORBIDDEN) if the worker can tell routers by their certificates alone and the caller
        is not one. With a grant key, the grant that comes with the request is checked instead."""
        if not self._keys:
            self._check_name("Generate", context)

    def _check_name(self, method: str, context: Context) -> None:
        if self._router_names and self._router_names.isdisjoint(names_of(context)):
            raise forbidden(f"{method} is for certificates with one of this worker's --tls-router-names")


@dataclass(frozen=True, slots=True)
class Bounds:
    """Most open calls. A host may have many connections, and must leave room for the calls of other hosts."""

    per_connection: int
    per_host: int
    in_all: int


class Places:
    """Counts open calls by their peers, as gRPC names them: `ipv4:10.0.0.7:50312`."""

    def __init__(self, what: str, bounds: Bounds) -> None:
        self._what = what
        self._bounds = bounds
        self._taken: Counter[str] = Counter()  # by connection, and by host
        self.num_taken = 0

    def take(self, peer: str) -> None:
        """Counts one more open call of this peer. Raises RequestRefused (OVERLOADED) if a bound is reached."""
        bounds, host = self._bounds, host_of(peer)
        for taken, most, whose in (
            (self._taken[peer], bounds.per_connection, "of one connection"),
            (self._taken[host], bounds.per_host, "of one host"),
            (self.num_taken, bounds.in_all, "in all"),
        ):
            if taken >= most:
                message = f"this worker has {taken} open {self._what} {whose}, which is its limit"
                raise RequestRefused(CODE_RESOURCE_EXHAUSTED, OVERLOADED, message, retry_delay_ms=RETRY_MS)
        self._taken[peer] += 1
        self._taken[host] += 1
        self.num_taken += 1

    def give_back(self, peer: str) -> None:
        """Counts one open call less. The peer must have taken a place."""
        self.num_taken -= 1
        for name in (peer, host_of(peer)):
            self._taken[name] -= 1
            if not self._taken[name]:
                del self._taken[name]


def host_of(peer: str) -> str:
    """Returns the peer without its port."""
    return peer.rpartition(":")[0]


class Uploads:
    """Reads at most `most` requests at once. One more displaces another: on the host with the most reads, on that
    host's connection with the most, the one that has been read for longest. Reading a request whose data has arrived
    takes less than a millisecond."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._reading: dict[asyncio.Timeout, str] = {}  # peers by place, oldest first
        self._turns: dict[str, tuple[asyncio.Semaphore, int]] = {}  # by connection, with the number of its calls

    async def read(self, context: Context) -> Any:
        """Returns the first message of a call, or grpc.aio.EOF. Raises RequestRefused (OVERLOADED) if displaced."""
        async with self._turn(context.peer()):
            return await self.read_next(context)

    async def read_next(self, context: Context) -> Any:
        """Does the same without waiting for other reads of the connection."""
        peer = context.peer()
        if len(self._reading) >= self._most:
            displaced = self._displaced_by(peer)
            del self._reading[displaced]
            displaced.reschedule(asyncio.get_running_loop().time())
        try:
            async with asyncio.timeout(None) as place:
                self._reading[place] = peer
                try:
                    return await context.read()
                finally:
                    self._reading.pop(place, None)
        except TimeoutError:
            message = "the request arrived too slowly while many others were being read"
            raise RequestRefused(CODE_RESOURCE_EXHAUSTED, OVERLOADED, message, retry_delay_ms=RETRY_MS) from None

    def _displaced_by(self, peer: str) -> asyncio.Timeout:
        """Returns the place that a request of this peer takes over when all are taken. It may be of the same host."""
        peers = (*self._reading.values(), peer)
        by_connection, by_host = Counter(peers), Counter(map(host_of, peers))

        def held(place: asyncio.Timeout) -> tuple[int, int]:
            of = self._reading[place]
            return by_host[host_of(of)], by_connection[of]

        return max(self._reading, key=held)  # of equals, the oldest

    @asynccontextmanager
    async def _turn(self, peer: str) -> AsyncIterator[None]:
        turn, wanted = self._turns.get(peer, (asyncio.Semaphore(PER_CONNECTION), 0))
        self._turns[peer] = (turn, wanted + 1)
        try:
            async with turn:
                yield
        finally:
            turn, wanted = self._turns.pop(peer)
            if wanted > 1:
                self._turns[peer] = (turn, wanted - 1)


# Each kind of call has its own places, so that a flood of one kind does not block another. Health/Check has no limit:
# orchestrators kill a worker that does not answer it.
KINDS = {
    # A router calls it once for each connection.
    "GetModel": Bounds(per_connection=64, per_host=256, in_all=1024),
    "GetStats": Bounds(per_connection=64, per_host=256, in_all=1024),
    "Drain": Bounds(per_connection=8, per_host=32, in_all=64),
    "Undrain": Bounds(per_connection=8, per_host=32, in_all=64),
    # A router fetches a tokenizer once in its life. A call whose caller stops reading holds about 100 KiB.
    "GetTokenizer": Bounds(per_connection=4, per_host=32, in_all=64),
    # The method of grpc.health.v1.Health. Each call takes 20 to 30 KB.
    "Watch": Bounds(per_connection=16, per_host=256, in_all=1024),
    # For command-line tools. Its messages do not count as uploads, and may have any length up to the maximum.
    "ServerReflectionInfo": Bounds(per_connection=4, per_host=8, in_all=32),
}
# A router process has a session and a cache watch, and briefly two of each while it reconnects. Callers that prove the
# key, or have a router's certificate, are routers; hundreds of router processes may share one address. A worker that
# checks neither cannot tell routers from strangers. A session may hold a partly received message.
OF_ROUTERS = Bounds(per_connection=4, per_host=1024, in_all=4096)
OF_STRANGERS = Bounds(per_connection=4, per_host=64, in_all=128)


def most_message_bytes(model: GetModelResponse) -> int:
    """Returns the largest size in bytes of a message to a worker with this model; gRPC refuses longer ones."""
    most_submits_bytes = MAX_SUBMITS_BYTES + 5 * MAX_SUBMITS  # with their tags
    return max(most_submits_bytes, most_submit_bytes(model)) + MAX_ABORT_BYTES + SMALL_REQUEST_BYTES


class Door:
    """The worker's RequestGate: checks the caller and takes a place for each call before its request is read."""

    def __init__(self, authorizer: CallAuthorizer, model: GetModelResponse) -> None:
        self._authorizer = authorizer
        most = 2 * (model.max_waiting_requests + model.max_running_requests) + OTHER_CALLS
        by_router = OF_ROUTERS if authorizer.knows_routers else OF_STRANGERS
        bounds = {
            **KINDS,
            **dict.fromkeys(BY_ROUTERS, by_router),
            "Generate": Bounds(per_connection=most, per_host=int(most * HOST_SHARE), in_all=most),
        }
        self._kinds = {name: Places(f"{name} calls", each) for name, each in bounds.items()}
        self._uploads = Uploads(max(8, UPLOAD_BYTES // most_message_bytes(model)))
        self._most_submit_bytes = most_submit_bytes(model)

    def enter(self, method: str, context: Context) -> "Visit":
        """Admits a call by its full method name, e.g. "/package.Service/Method".

        Raises RequestRefused: UNAUTHENTICATED if the call lacks a valid proof, FORBIDDEN if its certificate is not a
        router's, OVERLOADED if its kind has no place.
        """
        _, service, name = method.split("/")
        if service == SERVICE and name in GATED:
            self._authorizer.check(name, context)
        elif service == SERVICE and name == "Generate":
            self._authorizer.check_generate(context)
        peer = context.peer()
        places = None if method == HEALTH_CHECK else self._kinds[name]
        if places is not None:
            places.take(peer)
        return Visit(method, peer, places, self._uploads, self._most_submit_bytes)


class Visit:
    """One admitted call: a Passage that holds the call's place until leave()."""

    def __init__(self, method: str, peer: str, places: Places | None, uploads: Uploads, most_submit_bytes: int) -> None:
        self._method = method
        self._peer = peer
        self._places = places
        self._uploads = uploads
        self._most_submit_bytes = most_submit_bytes

    async def read(self, context: Context) -> Any:
        """Returns the bytes of the next message, or grpc.aio.EOF. Raises RequestRefused if it is too large, or if it
        arrives too slowly while too many others are being read."""
        name = self._method.rpartition("/")[2]
        if name in STREAMS:
            return await context.read()  # a session splits its messages before it parses them
        raw = await (self._uploads.read_next if self._method == HEALTH_CHECK else self._uploads.read)(context)
        if raw is not grpc.aio.EOF:
            if name == "Generate":
                check_generate(raw, self._most_submit_bytes)
            elif len(raw) > SMALL_REQUEST_BYTES:
                raise invalid("request", f"a request of {name} has at most {SMALL_REQUEST_BYTES} bytes")
        return raw

    def answer_begins(self) -> None:
        """Does nothing: no resource is held for the request's memory alone."""

    def leave(self) -> None:
        """Gives back the call's place."""
        if self._places is not None:
            self._places.give_back(self._peer)

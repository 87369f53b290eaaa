"""What calls to a worker pass before anything of them is read: the key, and places for calls of their kind."""

from typing import Any

import grpc

from trunkline.status import invalid
from trunkline.v1.worker_pb2 import GetModelResponse
from trunkline_worker.door.call_authorizer import CallAuthorizer
from trunkline_worker.door.places import Bounds, Places
from trunkline_worker.door.uploads import Uploads
from trunkline_worker.front.service import SERVICE
from trunkline_worker.front.session import MAX_ABORT_BYTES, MAX_SUBMITS
from trunkline_worker.front.submit_size import check_generate, most_submit_bytes

# For routers and operators, where the worker has a key.
GATED = ("Session", "WatchCache", "GetStats", "Drain")
# Each kind of call has places of its own: a flood of one kind takes none from calls of another kind. Health/Check has
# no places, and is never refused for the number of calls: orchestrators kill a worker that does not answer it.
KINDS = {
    # A router asks once for each connection.
    "GetModel": Bounds(per_connection=64, per_host=256, in_all=1024),
    "GetStats": Bounds(per_connection=64, per_host=256, in_all=1024),
    "Drain": Bounds(per_connection=8, per_host=32, in_all=64),
    # A tokenizer is fetched once in a router's life; each call that is not read on holds some 100 KiB.
    "GetTokenizer": Bounds(per_connection=4, per_host=32, in_all=64),
    # Of grpc.health.v1.Health. Each takes 20 to 30 KB.
    "Watch": Bounds(per_connection=16, per_host=256, in_all=1024),
    # For a person with a command line. Its messages are not among the uploads, and each may be as long as any.
    "ServerReflectionInfo": Bounds(per_connection=4, per_host=8, in_all=32),
}
# A router process has a session and a watch of the cache, twice for a moment when it connects anew. Callers that have
# shown the key are routers; hundreds of their processes may stand behind one address. A worker without a key cannot
# tell them from strangers, and each session may hold a message of MESSAGE_BYTES that has arrived in part.
OF_ROUTERS = Bounds(per_connection=4, per_host=1024, in_all=4096)
OF_STRANGERS = Bounds(per_connection=4, per_host=64, in_all=128)
BY_ROUTERS = ("Session", "WatchCache")
# Direct calls beyond those that wait or run twice over: of which the headers alone have come, or that are at their end.
OTHER_CALLS = 1024
HOST_SHARE = 0.75  # of direct calls
# Of a session. A router of protocol 2 may put 16 MiB of submits into one message, where a request has many choices. The
# tags of the submits and the handles of aborts come on top.
MESSAGE_BYTES = (16 << 20) + 5 * MAX_SUBMITS + MAX_ABORT_BYTES
UPLOAD_BYTES = 512 << 20  # being read, of all calls but sessions and reflection
SMALL_REQUEST_BYTES = 64 << 10  # of every method that takes no submit
# Their messages come as long as the call lasts: to wait for one takes no place from requests that are being read.
STREAMS = ("Session", "ServerReflectionInfo")
HEALTH_CHECK = "/grpc.health.v1.Health/Check"

Context = grpc.aio.ServicerContext[Any, Any]


def most_message_bytes(model: GetModelResponse) -> int:
    """Of any message to a worker with this model; gRPC itself refuses longer ones."""
    return max(MESSAGE_BYTES, most_submit_bytes(model) + SMALL_REQUEST_BYTES)


class Door:
    """A RequestGate; see the module."""

    def __init__(self, authorizer: CallAuthorizer, model: GetModelResponse) -> None:
        self._authorizer = authorizer
        most = 2 * (model.max_waiting_requests + model.max_running_requests) + OTHER_CALLS
        by_router = OF_ROUTERS if authorizer.has_key else OF_STRANGERS
        bounds = {
            **KINDS,
            **dict.fromkeys(BY_ROUTERS, by_router),
            "Generate": Bounds(per_connection=most, per_host=int(most * HOST_SHARE), in_all=most),
        }
        self._kinds = {name: Places(f"{name} calls", each) for name, each in bounds.items()}
        self._uploads = Uploads(max(8, UPLOAD_BYTES // most_message_bytes(model)))
        self._most_submit_bytes = most_submit_bytes(model)

    def enter(self, method: str, context: Context) -> "Visit":
        """Raises RequestRefused: UNAUTHENTICATED, OVERLOADED."""
        _, service, name = method.split("/")
        if service == SERVICE and name in GATED:
            self._authorizer.check(name, context.invocation_metadata())
        peer = context.peer()
        places = None if method == HEALTH_CHECK else self._kinds[name]
        if places is not None:
            places.take(peer)
        return Visit(method, peer, places, self._uploads, self._most_submit_bytes)


class Visit:
    """One call's Passage."""

    def __init__(self, method: str, peer: str, places: Places | None, uploads: Uploads, most_submit_bytes: int) -> None:
        self._method = method
        self._peer = peer
        self._places = places
        self._uploads = uploads
        self._most_submit_bytes = most_submit_bytes

    async def read(self, context: Context) -> Any:
        """See Passage."""
        name = self._method.rpartition("/")[2]
        if name in STREAMS:
            return await context.read()  # a session takes its messages apart before it parses them
        raw = await (self._uploads.read_next if self._method == HEALTH_CHECK else self._uploads.read)(context)
        if raw is not grpc.aio.EOF:
            if name == "Generate":
                check_generate(raw, self._most_submit_bytes)
            elif len(raw) > SMALL_REQUEST_BYTES:
                raise invalid("request", f"a request of {name} has at most {SMALL_REQUEST_BYTES} bytes")
        return raw

    def answer_begins(self) -> None:
        """Nothing is held for the request's memory alone."""

    def leave(self) -> None:
        """See Passage."""
        if self._places is not None:
            self._places.give_back(self._peer)

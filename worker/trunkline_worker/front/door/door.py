"""Admits calls to a worker before their requests are read: checks callers, and bounds the calls of each kind."""

from typing import Any

import grpc

from trunkline.status import invalid
from trunkline.v1.worker_pb2 import GetModelResponse
from trunkline_worker.front.door.call_authorizer import CallAuthorizer
from trunkline_worker.front.door.places import Bounds, Places
from trunkline_worker.front.door.uploads import Uploads
from trunkline_worker.front.service import SERVICE
from trunkline_worker.front.session import MAX_ABORT_BYTES, MAX_SUBMITS
from trunkline_worker.front.submit_size import check_generate, most_submit_bytes

# Only routers and operators may call these, if the worker can tell callers apart.
GATED = ("Session", "WatchCache", "GetStats", "Drain", "Undrain")
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
# checks neither cannot tell routers from strangers. A session may hold a partly received message of MESSAGE_BYTES.
OF_ROUTERS = Bounds(per_connection=4, per_host=1024, in_all=4096)
OF_STRANGERS = Bounds(per_connection=4, per_host=64, in_all=128)
BY_ROUTERS = ("Session", "WatchCache")
# Direct calls allowed on top of twice those that can wait or run: calls that have only sent headers, or are ending.
OTHER_CALLS = 1024
HOST_SHARE = 0.75  # largest share of the direct calls for one host
# Longest message of a session. A router of protocol 2 may put 16 MiB of submits into one message if a request has many
# choices. The submits' tags and the handles of aborts are added.
MESSAGE_BYTES = (16 << 20) + 5 * MAX_SUBMITS + MAX_ABORT_BYTES
UPLOAD_BYTES = 512 << 20  # being read at once, over all calls except sessions and reflection
SMALL_REQUEST_BYTES = 64 << 10  # longest request of a method that takes no submit
# Their messages arrive for as long as the call lasts, so waiting for one must not occupy a place among the uploads.
STREAMS = ("Session", "ServerReflectionInfo")
HEALTH_CHECK = "/grpc.health.v1.Health/Check"

Context = grpc.aio.ServicerContext[Any, Any]


def most_message_bytes(model: GetModelResponse) -> int:
    """Returns the largest size in bytes of a message to a worker with this model; gRPC refuses longer ones."""
    return max(MESSAGE_BYTES, most_submit_bytes(model) + SMALL_REQUEST_BYTES)


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

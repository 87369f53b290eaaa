"""What calls to a worker pass before anything of them is read: the key, and places for calls of their kind."""

from collections.abc import Sequence
from typing import Any

import grpc

from trunkline.status import invalid
from trunkline.v1.worker_pb2 import GetModelResponse
from trunkline_worker.gate import Gate
from trunkline_worker.places import Bounds, Places
from trunkline_worker.service import SERVICE
from trunkline_worker.submit_size import check_generate, most_submit_bytes
from trunkline_worker.uploads import Uploads

# For routers and operators, where the worker has a key.
GATED = ("Session", "WatchCache", "GetStats", "Drain")
# A router process has a session and a watch, twice for a moment when it connects anew. A tokenizer is fetched once in a
# router's life; each call that is not read on holds some 100 KiB.
KINDS = {
    "Session": Bounds(per_connection=4, per_host=64, in_all=256),
    "WatchCache": Bounds(per_connection=4, per_host=64, in_all=256),
    "GetTokenizer": Bounds(per_connection=4, per_host=32, in_all=64),
}
# Of calls that stand open without having anything to compute, such as health watches. Each takes 20 to 30 KB.
OTHER_CALLS = 2048
MESSAGE_BYTES = 4 << 20  # of a session, or a submit where one may be larger
UPLOAD_BYTES = 128 << 20  # being read, of all calls but sessions
SMALL_REQUEST_BYTES = 64 << 10  # of every method that takes no submit
# Their messages come as long as the call lasts: to wait for one takes no place from requests that are being read.
STREAMS = ("Session", "ServerReflectionInfo")

Context = grpc.aio.ServicerContext[Any, Any]


def most_message_bytes(model: GetModelResponse) -> int:
    """Of any message to a worker with this model; gRPC itself refuses longer ones."""
    return max(MESSAGE_BYTES, most_submit_bytes(model)) + SMALL_REQUEST_BYTES


class Door:
    """A RequestGate; see the module."""

    def __init__(self, gate: Gate, model: GetModelResponse) -> None:
        self._gate = gate
        most = 2 * (model.max_waiting_requests + model.max_running_requests) + OTHER_CALLS
        self._all = Places("calls", Bounds(per_connection=most, per_host=most * 3 // 4, in_all=most))
        self._kinds = {name: Places(f"{name} calls", bounds) for name, bounds in KINDS.items()}
        self._uploads = Uploads(max(8, UPLOAD_BYTES // most_message_bytes(model)))
        self._most_submit_bytes = most_submit_bytes(model)

    def enter(self, method: str, context: Context) -> "Visit":
        """Raises RequestRefused: UNAUTHENTICATED, OVERLOADED."""
        _, service, name = method.split("/")
        own = name if service == SERVICE else ""
        if own in GATED:
            self._gate.check(own, context.invocation_metadata())
        peer = context.peer()
        taken: list[Places] = []
        try:
            for places in (self._all, self._kinds.get(own)):
                if places is not None:
                    places.take(peer)
                    taken.append(places)
        except BaseException:
            _give_back(taken, peer)
            raise
        return Visit(name, peer, taken, self._uploads, self._most_submit_bytes)


class Visit:
    """One call's Passage."""

    def __init__(self, name: str, peer: str, taken: Sequence[Places], uploads: Uploads, most_submit_bytes: int) -> None:
        self._name = name
        self._peer = peer
        self._taken = taken
        self._uploads = uploads
        self._most_submit_bytes = most_submit_bytes

    async def read(self, context: Context) -> Any:
        """See Passage."""
        if self._name in STREAMS:
            return await context.read()  # a session takes its messages apart before it parses them
        raw = await self._uploads.read(context)
        if raw is not grpc.aio.EOF:
            if self._name == "Generate":
                check_generate(raw, self._most_submit_bytes)
            elif len(raw) > SMALL_REQUEST_BYTES:
                raise invalid("request", f"a request of {self._name} has at most {SMALL_REQUEST_BYTES} bytes")
        return raw

    async def check(self, raw: bytes) -> None:
        """A message after the first one; see read()."""

    def answer_begins(self) -> None:
        """Nothing is held for the request's memory alone."""

    def leave(self) -> None:
        """See Passage."""
        _give_back(self._taken, self._peer)


def _give_back(taken: Sequence[Places], peer: str) -> None:
    for places in taken:
        places.give_back(peer)

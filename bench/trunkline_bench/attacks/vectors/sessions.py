"""Attacks on a worker's own port: sessions with messages that no router sends."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import grpc

from trunkline.v1.worker_pb2 import SessionHello, SessionRequest
from trunkline_bench.attacks.vectors.calls import COOL_S, MIB, SUBMITS, WORKER, open_channel, side_by_side
from trunkline_bench.attacks.vectors.wire import empty_entries, nested

HELLO = SessionRequest(hello=SessionHello(router_id="attacker")).SerializeToString()
MESSAGES = 4  # of a session, at most
LEAST_TIMEOUT_S = 0.1
UNKNOWN = 1000  # a field that the contract does not have


@dataclass(frozen=True, slots=True)
class Session:
    """Sessions that repeat one message. `at_once`: number of concurrent sessions."""

    message: Callable[[], bytes]
    at_once: int = 2


SESSIONS: Mapping[str, Session] = {
    "sessions with 8 MiB of empty submits": Session(lambda: empty_entries(SUBMITS, 8 * MIB)),
    "sessions with 63 MiB of empty submits": Session(lambda: empty_entries(SUBMITS, 63 * MIB)),
    "sessions with 63 MiB of nothing known": Session(lambda: nested(UNKNOWN, bytes(63 * MIB)), at_once=4),
}


def open_again_and_again(session: Session, port: int, duration_s: float, outcomes: Counter[str]) -> None:
    """Opens sessions until `duration_s` is over, and counts the statuses. "outputs": messages from the worker."""
    message, end_s = session.message(), time.monotonic() + duration_s

    def one_after_another() -> None:
        with open_channel(port) as channel:
            method: Any = channel.stream_stream(WORKER + "Session")
            while time.monotonic() < end_s:

                def messages() -> Iterator[bytes]:
                    yield HELLO
                    for _ in range(MESSAGES):
                        yield message

                call = method(messages(), timeout=max(LEAST_TIMEOUT_S, end_s - time.monotonic()))
                try:
                    for _ in call:
                        outcomes["outputs"] += 1
                    outcomes["OK"] += 1
                except grpc.RpcError as error:
                    outcomes[error.code().name] += 1
                    time.sleep(COOL_S)

    side_by_side([one_after_another] * session.at_once)

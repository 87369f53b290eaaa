"""One attack, as a process of its own: what it costs its author must not count as the victim's latency.

usage: python -m trunkline_bench.attacks.attacker NAME ADDRESS [--seconds 8]

Prints how often it struck and with what statuses, as JSON.
"""

import argparse
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import grpc

from trunkline.metadata import TENANT_KEY
from trunkline.v1.generation_pb2 import SamplingParams
from trunkline.v1.inference_pb2 import (
    ChatMessage,
    ChatMessages,
    DetokenizeRequest,
    GenerateRequest,
    TokenIds,
    TokenizeRequest,
)
from trunkline_bench.attacks.frames import half_open, rapid_reset

SERVICE = "/trunkline.v1.InferenceService/"
TENANT = "attacker"
CALL_TIMEOUT_S = 60.0
MIB = 1 << 20
HALF_OPEN_STREAMS = 20_000


@dataclass(frozen=True, slots=True)
class Attack:
    """Calls of one method with one message, again and again; `at_once`: so many side by side."""

    method: str
    message: Callable[[], bytes]
    at_once: int = 2
    gzip: bool = False


def _empty_messages(num_bytes: int) -> bytes:
    return GenerateRequest(chat=ChatMessages(messages=[ChatMessage()] * (num_bytes // 2))).SerializeToString()


def _empty_stop_strings(count: int) -> bytes:
    return GenerateRequest(text="x", sampling=SamplingParams(stop=[""] * count)).SerializeToString()


def _prose(num_bytes: int) -> str:
    sentence = "The little dog ran to the park, and saw 12 birds there. "
    return (sentence * (num_bytes // len(sentence) + 1))[:num_bytes]


# The largest form of each that has been seen to do harm, and what just passes.
CALLS: Mapping[str, Attack] = {
    "empty chat messages, 63 MiB, gzip": Attack("Generate", lambda: _empty_messages(63 * MIB), gzip=True),
    "empty chat messages, 4 MiB": Attack("Generate", lambda: _empty_messages(4 * MIB)),
    "detokenize 63 million ids": Attack(
        "Detokenize", lambda: DetokenizeRequest(token_ids=[5] * (63 * MIB)).SerializeToString()
    ),
    "detokenize one million ids": Attack(
        "Detokenize", lambda: DetokenizeRequest(token_ids=[300] * MIB).SerializeToString()
    ),
    "detokenize as many ids as are taken": Attack(
        "Detokenize", lambda: DetokenizeRequest(token_ids=[300] * (MIB // 4)).SerializeToString()
    ),
    "tokenize 15.9 MiB": Attack("Tokenize", lambda: TokenizeRequest(text=_prose(159 * MIB // 10)).SerializeToString()),
    "tokenize 4 MiB": Attack("Tokenize", lambda: TokenizeRequest(text=_prose(4 * MIB)).SerializeToString()),
    "tokenize 4 MiB, 64 at once": Attack(
        "Tokenize", lambda: TokenizeRequest(text="! " * (2 * MIB)).SerializeToString(), at_once=64
    ),
    "tokenize 100 KiB, 16 at once": Attack(
        "Tokenize", lambda: TokenizeRequest(text=_prose(MIB // 10)).SerializeToString(), at_once=16
    ),
    "generate with 63 million ids": Attack(
        "Generate", lambda: GenerateRequest(token_ids=TokenIds(ids=[5] * (63 * MIB))).SerializeToString()
    ),
    "generate with 4 million ids": Attack(
        "Generate", lambda: GenerateRequest(token_ids=TokenIds(ids=[5] * (4 * MIB))).SerializeToString()
    ),
    "33 million empty stop strings": Attack("Generate", lambda: _empty_stop_strings(33_000_000)),
    "3 million empty stop strings": Attack("Generate", lambda: _empty_stop_strings(3_000_000)),
}
CONNECTIONS: Mapping[str, Callable[[int, float], int]] = {
    "rapid reset": lambda port, duration_s: rapid_reset(port, SERVICE + "Generate", duration_s),
    "20,000 half-open streams": lambda port, duration_s: half_open(
        port, SERVICE + "Generate", HALF_OPEN_STREAMS, duration_s
    ),
}
NAMES = (*CALLS, *CONNECTIONS)


def strike(attack: Attack, address: str, duration_s: float) -> Counter[str]:
    """Calls until the time is over; returns how often each status came."""
    message = attack.message()
    end_s = time.monotonic() + duration_s
    outcomes: Counter[str] = Counter()
    options = (("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1))

    def call_again_and_again() -> None:
        with grpc.insecure_channel(address, options=(*options, ("grpc.use_local_subchannel_pool", 1))) as channel:
            unary: Any = channel.unary_stream(SERVICE + attack.method)
            compression = grpc.Compression.Gzip if attack.gzip else None
            while time.monotonic() < end_s:
                try:
                    for _ in unary(
                        message, metadata=((TENANT_KEY, TENANT),), compression=compression, timeout=CALL_TIMEOUT_S
                    ):
                        pass
                    outcomes["OK"] += 1
                except grpc.RpcError as error:
                    outcomes[error.code().name] += 1
                    time.sleep(0.01)

    threads = [threading.Thread(target=call_again_and_again) for _ in range(attack.at_once)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=NAMES)
    parser.add_argument("address")
    parser.add_argument("--seconds", type=float, default=8.0)
    arguments = parser.parse_args()
    if arguments.name in CALLS:
        outcomes = dict(strike(CALLS[arguments.name], arguments.address, arguments.seconds))
    else:
        port = int(arguments.address.rpartition(":")[2])
        outcomes = {"streams": CONNECTIONS[arguments.name](port, arguments.seconds)}
    print(json.dumps(outcomes))


if __name__ == "__main__":
    main()

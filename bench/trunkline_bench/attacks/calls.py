"""Calls of one method with one hostile message, again and again."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import grpc

from trunkline.metadata import TENANT_KEY
from trunkline.v1.generation_pb2 import SamplingParams
from trunkline.v1.inference_pb2 import ChatMessage, ChatMessages, GenerateRequest
from trunkline_bench.attacks.wire import empty_entries, nested

ROUTER = "/trunkline.v1.InferenceService/"
WORKER = "/trunkline.v1.WorkerService/"
TENANT = "attacker"
MOST_GRACE_S = 10.0  # for the last calls, once the time is over
COOL_S = 0.01  # before the next call where one was refused
MIB = 1 << 20
UNLIMITED = (("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1))

# Field numbers, as in the contract.
TEXT, TOKEN_IDS, CHAT, SAMPLING = 2, 3, 4, 5  # of GenerateRequest
STOP = 12  # of SamplingParams
TOKENIZED_TEXT, DETOKENIZED_IDS = 2, 2
SUBMITS = 2  # of SessionRequest


@dataclass(frozen=True, slots=True)
class Call:
    """`at_once`: so many side by side, each on a connection of its own."""

    method: str
    message: Callable[[], bytes]
    at_once: int = 2
    gzip: bool = False


def _chat(num_bytes: int) -> bytes:
    return nested(CHAT, empty_entries(1, num_bytes))


def _ids(field: int, count: int, token: int) -> bytes:
    """Of tokens below 128."""
    return nested(field, bytes([token]) * count)


def _stop_strings(count: int) -> bytes:
    return nested(TEXT, b"x") + nested(SAMPLING, empty_entries(STOP, 2 * count))


def _prose(num_bytes: int) -> bytes:
    sentence = b"The little dog ran to the park, and saw 12 birds there. "
    return (sentence * (num_bytes // len(sentence) + 1))[:num_bytes]


def _generate(prompt: str = "Once", **sampling: Any) -> bytes:
    return GenerateRequest(text=prompt, sampling=SamplingParams(ignore_eos=True, **sampling)).SerializeToString()


def _slow_conversation() -> bytes:
    """As many messages as a conversation may have."""
    messages = [ChatMessage(role="user" if turn % 2 == 0 else "assistant", content="a b") for turn in range(4096)]
    return GenerateRequest(chat=ChatMessages(messages=messages)).SerializeToString()


# The largest form of each that has been seen to do harm, and what just passes.
LARGE_CALLS: Mapping[str, Call] = {
    "empty chat messages, 63 MiB, gzip": Call(ROUTER + "Generate", lambda: _chat(63 * MIB), gzip=True),
    "empty chat messages, 4 MiB": Call(ROUTER + "Generate", lambda: _chat(4 * MIB)),
    "detokenize 63 million ids": Call(ROUTER + "Detokenize", lambda: _ids(DETOKENIZED_IDS, 63 * MIB, 5)),
    "detokenize one million ids": Call(ROUTER + "Detokenize", lambda: _ids(DETOKENIZED_IDS, MIB, 100)),
    "detokenize as many ids as are taken": Call(ROUTER + "Detokenize", lambda: _ids(DETOKENIZED_IDS, MIB // 4, 100)),
    "tokenize 15.9 MiB": Call(ROUTER + "Tokenize", lambda: nested(TOKENIZED_TEXT, _prose(159 * MIB // 10))),
    "tokenize 4 MiB": Call(ROUTER + "Tokenize", lambda: nested(TOKENIZED_TEXT, _prose(4 * MIB))),
    "tokenize 4 MiB, 64 at once": Call(
        ROUTER + "Tokenize", lambda: nested(TOKENIZED_TEXT, b"! " * (2 * MIB)), at_once=64
    ),
    "tokenize 100 KiB, 16 at once": Call(
        ROUTER + "Tokenize", lambda: nested(TOKENIZED_TEXT, _prose(MIB // 10)), at_once=16
    ),
    "explain the route of 4 MiB": Call(
        "/trunkline.v1.FleetService/ExplainRoute", lambda: nested(1, nested(TEXT, _prose(4 * MIB)))
    ),
    "generate with 63 million ids": Call(
        ROUTER + "Generate", lambda: nested(TOKEN_IDS, _ids(1, 63 * MIB, 5)), at_once=2
    ),
    "generate with 4 million ids": Call(ROUTER + "Generate", lambda: nested(TOKEN_IDS, _ids(1, 4 * MIB, 5))),
    "33 million empty stop strings": Call(ROUTER + "Generate", lambda: _stop_strings(33_000_000)),
    "3 million empty stop strings": Call(ROUTER + "Generate", lambda: _stop_strings(3_000_000)),
}
# What has held since it was first tried.
SMALL_CALLS: Mapping[str, Call] = {
    "stop strings at their worst": Call(
        ROUTER + "Generate",
        lambda: _generate("a" * 900, stop=["a" * 1023 + chr(65 + one) for one in range(16)], max_tokens=64),
        at_once=16,
    ),
    "1,024 logit biases": Call(
        ROUTER + "Generate",
        lambda: _generate(logit_bias={token: (-1) ** token * 100.0 for token in range(1024)}, max_tokens=64),
        at_once=16,
    ),
    "20 log-probabilities of every token": Call(
        ROUTER + "Generate",
        lambda: _generate("a b " * 200, logprobs=20, prompt_logprobs=20, max_tokens=64),
        at_once=16,
    ),
    "conversations of 4,096 messages": Call(ROUTER + "Generate", _slow_conversation, at_once=8),
}
MALFORMED: Mapping[str, Call] = {
    "malformed messages, small": Call(ROUTER + "Generate", lambda: b"\x0a\xff\xff\xff\xff\x0f" * 100, at_once=4),
    "malformed messages, 1 MiB": Call(ROUTER + "Generate", lambda: b"\x0a\xff\xff\xff\xff\x0f" * (MIB // 6)),
}
CALLS: Mapping[str, Call] = {**LARGE_CALLS, **SMALL_CALLS, **MALFORMED}


def call_again_and_again(call: Call, port: int, duration_s: float) -> Counter[str]:
    """How often each status came."""
    message, end_s = call.message(), time.monotonic() + duration_s
    over_s = end_s + min(MOST_GRACE_S, 2 * duration_s)
    outcomes: Counter[str] = Counter()

    def one_after_another() -> None:
        with open_channel(port) as channel:
            method: Any = channel.unary_stream(call.method)
            compression = grpc.Compression.Gzip if call.gzip else None
            while time.monotonic() < end_s:
                try:
                    timeout_s = over_s - time.monotonic()
                    for _ in method(
                        message, metadata=((TENANT_KEY, TENANT),), compression=compression, timeout=timeout_s
                    ):
                        pass
                    outcomes["OK"] += 1
                except grpc.RpcError as error:
                    outcomes[error.code().name] += 1
                    time.sleep(COOL_S)

    side_by_side([one_after_another] * call.at_once)
    return outcomes


def side_by_side(works: list[Callable[[], None]]) -> None:
    """Returns when the last one has ended."""
    threads = [threading.Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def open_channel(port: int) -> grpc.Channel:
    """A connection of its own."""
    options = (*UNLIMITED, ("grpc.use_local_subchannel_pool", 1))
    return grpc.insecure_channel(f"127.0.0.1:{port}", options=options)

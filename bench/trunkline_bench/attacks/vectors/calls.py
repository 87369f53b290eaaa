"""Attacks that call one method with one hostile message, again and again."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import grpc

from trunkline.names import TENANT_KEY
from trunkline.v1.generation_pb2 import SamplingParams
from trunkline.v1.inference_pb2 import ChatMessage, ChatMessages, GenerateRequest
from trunkline_bench.attacks.vectors.wire import empty_entries, nested

ROUTER = "/trunkline.v1.InferenceService/"
WORKER = "/trunkline.v1.WorkerService/"
TENANT = "attacker"
COOL_S = 0.01  # pause after a refused call
MIB = 1 << 20
UNLIMITED = (("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1))

# Field numbers, as in the contract.
TEXT, TOKEN_IDS, CHAT, SAMPLING = 2, 3, 4, 5  # of GenerateRequest
STOP = 12  # of SamplingParams
TOKENIZED_TEXT, DETOKENIZED_IDS = 2, 2
SUBMITS = 2  # of SessionRequest


@dataclass(frozen=True, slots=True)
class Call:
    """A hostile call. `message` makes a message of a size, in bytes or entries; `size`: the one of the attack.

    at_once: number of concurrent calls, each on a connection of its own
    """

    method: str
    message: Callable[[int], bytes]
    size: int
    at_once: int = 2
    gzip: bool = False


def _empty_messages(num_bytes: int) -> bytes:
    return nested(CHAT, empty_entries(1, num_bytes))


def _detokenized(count: int) -> bytes:
    return nested(DETOKENIZED_IDS, bytes([100]) * count)


def _tokenized(num_bytes: int) -> bytes:
    return nested(TOKENIZED_TEXT, _prose(num_bytes))


def _token_ids(count: int) -> bytes:
    return nested(TOKEN_IDS, nested(1, bytes([5]) * count))


def _stop_strings(count: int) -> bytes:
    return nested(TEXT, b"x") + nested(SAMPLING, empty_entries(STOP, 2 * count))


def _explained(num_bytes: int) -> bytes:
    return nested(1, nested(TEXT, _prose(num_bytes)))


def _prose(num_bytes: int) -> bytes:
    sentence = b"The little dog ran to the park, and saw 12 birds there. "
    return (sentence * (num_bytes // len(sentence) + 1))[:num_bytes]


def _generate(prompt: str = "Once", **sampling: Any) -> bytes:
    return GenerateRequest(text=prompt, sampling=SamplingParams(ignore_eos=True, **sampling)).SerializeToString()


def _conversation(turns: int) -> bytes:
    messages = [ChatMessage(role="user" if turn % 2 == 0 else "assistant", content="a b") for turn in range(turns)]
    return GenerateRequest(chat=ChatMessages(messages=messages)).SerializeToString()


GENERATE, TOKENIZE, DETOKENIZE = ROUTER + "Generate", ROUTER + "Tokenize", ROUTER + "Detokenize"
EXPLAIN = "/trunkline.v1.FleetService/ExplainRoute"
# The largest form of each call that has done harm, and the largest form that the router accepts.
LARGE_CALLS: Mapping[str, Call] = {
    "empty chat messages, 63 MiB, gzip": Call(GENERATE, _empty_messages, 63 * MIB, gzip=True),
    "empty chat messages, 4 MiB": Call(GENERATE, _empty_messages, 4 * MIB),
    "detokenize 63 million ids": Call(DETOKENIZE, _detokenized, 63 * MIB),
    "detokenize one million ids": Call(DETOKENIZE, _detokenized, MIB),
    "detokenize as many ids as are taken": Call(DETOKENIZE, _detokenized, MIB // 4),
    "tokenize 15.9 MiB": Call(TOKENIZE, _tokenized, 159 * MIB // 10),
    "tokenize 4 MiB": Call(TOKENIZE, _tokenized, 4 * MIB),
    "tokenize 4 MiB, 64 at once": Call(
        TOKENIZE, lambda num_bytes: nested(TOKENIZED_TEXT, b"! " * (num_bytes // 2)), 4 * MIB, at_once=64
    ),
    "tokenize 100 KiB, 16 at once": Call(TOKENIZE, _tokenized, MIB // 10, at_once=16),
    "explain the route of 4 MiB": Call(EXPLAIN, _explained, 4 * MIB),
    "generate with 63 million ids": Call(GENERATE, _token_ids, 63 * MIB),
    "generate with 4 million ids": Call(GENERATE, _token_ids, 4 * MIB),
    "33 million empty stop strings": Call(GENERATE, _stop_strings, 33_000_000),
    "3 million empty stop strings": Call(GENERATE, _stop_strings, 3_000_000),
}
# Calls that have never broken a bound.
SMALL_CALLS: Mapping[str, Call] = {
    "stop strings at their worst": Call(
        GENERATE,
        lambda length: _generate(
            "a" * 900, stop=["a" * (length - 1) + chr(65 + one) for one in range(16)], max_tokens=64
        ),
        1024,
        at_once=16,
    ),
    "1,024 logit biases": Call(
        GENERATE,
        lambda count: _generate(logit_bias={token: (-1) ** token * 100.0 for token in range(count)}, max_tokens=64),
        1024,
        at_once=16,
    ),
    "20 log-probabilities of every token": Call(
        GENERATE,
        lambda count: _generate("a b " * 200, logprobs=count, prompt_logprobs=count, max_tokens=64),
        20,
        at_once=16,
    ),
    "conversations of 4,096 messages": Call(GENERATE, _conversation, 4096, at_once=8),
}
_LONGER_THAN_IT_IS = b"\x0a\xff\xff\xff\xff\x0f"  # announces a string of four billion bytes that do not follow
MALFORMED: Mapping[str, Call] = {
    "malformed messages, small": Call(GENERATE, lambda count: _LONGER_THAN_IT_IS * count, 100, at_once=4),
    "malformed messages, 1 MiB": Call(GENERATE, lambda count: _LONGER_THAN_IT_IS * count, MIB // 6),
}
CALLS: Mapping[str, Call] = {**LARGE_CALLS, **SMALL_CALLS, **MALFORMED}


@cache
def message_of(call: Call) -> bytes:
    """The message that the attack sends. It is built once: the attacker builds it before the attack begins."""
    return call.message(call.size)


def call_again_and_again(call: Call, port: int, duration_s: float, outcomes: Counter[str]) -> None:
    """Repeats the call until `duration_s` is over, and counts the statuses."""
    message, end_s = message_of(call), time.monotonic() + duration_s

    def one_after_another() -> None:
        with open_channel(port) as channel:
            method: Any = channel.unary_stream(call.method)
            compression = grpc.Compression.Gzip if call.gzip else None
            while time.monotonic() < end_s:
                try:
                    for _ in method(message, metadata=((TENANT_KEY, TENANT),), compression=compression):
                        pass
                    outcomes["OK"] += 1
                except grpc.RpcError as error:
                    outcomes[error.code().name] += 1
                    time.sleep(COOL_S)

    side_by_side([one_after_another] * call.at_once)


def side_by_side(works: list[Callable[[], None]]) -> None:
    """Runs all of `works` in threads. Returns when the last one has ended."""
    threads = [threading.Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def open_channel(port: int) -> grpc.Channel:
    """A channel with a connection of its own."""
    options = (*UNLIMITED, ("grpc.use_local_subchannel_pool", 1))
    return grpc.insecure_channel(f"127.0.0.1:{port}", options=options)

"""Runs one attack. It is a process of its own, so that the attacker's work does not count as the victim's latency.

usage: python -m trunkline_bench.attacks.vectors.attacker NAME ADDRESS [--seconds 8]

It reports on standard error when the attack begins. At its end, or at SIGTERM, it prints how often each outcome
occurred, as JSON. It has a low scheduling priority, which leaves the cores to its victims (`priority.py`).
"""

import argparse
import asyncio
import json
import os
import signal
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import NoReturn

from trunkline.v1.generation_pb2 import SamplingParams
from trunkline.v1.inference_pb2 import GenerateRequest, TokenIds
from trunkline_bench.attacks.vectors.calls import (
    CALLS,
    LARGE_CALLS,
    ROUTER,
    WORKER,
    call_again_and_again,
    message_of,
    side_by_side,
)
from trunkline_bench.attacks.vectors.connections import (
    IDLE_CONNECTIONS,
    cancelled,
    continuation_flood,
    half_open,
    held,
    idle_connections,
    ping_flood,
    rapid_reset,
    settings_flood,
    strange_deadlines,
)
from trunkline_bench.attacks.vectors.floods import FLOODS, flood
from trunkline_bench.attacks.vectors.guided_floods import GUIDED_FLOODS
from trunkline_bench.attacks.vectors.http_floods import HOLDING_HTTP, HTTP_FLOODS
from trunkline_bench.attacks.vectors.priority import give_way
from trunkline_bench.attacks.vectors.redis_entries import ATTACKS as REDIS_ATTACKS
from trunkline_bench.attacks.vectors.sessions import HELLO, SESSIONS, open_again_and_again
from trunkline_bench.attacks.vectors.wire import nested
from trunkline_bench.faults.poison.sitecustomize import POISON

Strike = Callable[[int, float, Counter[str]], None]  # (port, seconds, outcomes that it counts)

GENERATE = ROUTER + "Generate"
HEALTH_WATCH = "/grpc.health.v1.Health/Watch"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
LIST_SERVICES = nested(7, b"")  # ServerReflectionRequest
BEGINS = "begins"
MANY, UNREAD = 10_000, 200
FAST_MODEL = "fast"  # of a false worker that answers as fast as the router reads
SHARED_NAME = "a-name-that-two-requests-have"
SHORT = GenerateRequest(text="Once", sampling=SamplingParams(max_tokens=1)).SerializeToString()
POISONED = GenerateRequest(
    token_ids=TokenIds(ids=[*POISON, 5, 6, 7]), request_id=SHARED_NAME, sampling=SamplingParams(max_tokens=20)
).SerializeToString()
ENDLESS = GenerateRequest(
    model=FAST_MODEL, text="x", n=16, sampling=SamplingParams(max_tokens=900, logprobs=20, ignore_eos=True)
).SerializeToString()

UNREAD_STREAMS = "200 unread streams"
ALL_OF_1_TO_5 = "all of these at once"

# Each of these strikes once and then holds its connections or streams open.
HOLDING_A_ROUTER: Mapping[str, Strike] = {
    "10,000 health watches": partial(held, HEALTH_WATCH, b"", MANY, ends=True),
    "10,000 reflection streams": partial(held, REFLECTION, LIST_SERVICES, MANY),
    "5,000 idle connections": partial(idle_connections, IDLE_CONNECTIONS),
    "a deadly request under another's name": partial(held, GENERATE, POISONED, 1, ends=True),
    UNREAD_STREAMS: partial(held, GENERATE, ENDLESS, UNREAD, ends=True),
}
HOLDING_A_WORKER: Mapping[str, Strike] = {
    "10,000 unread tokenizers": partial(held, WORKER + "GetTokenizer", b"", MANY, ends=True),
    "10,000 unread cache watches": partial(held, WORKER + "WatchCache", b"", MANY, ends=True),
    "10,000 idle sessions": partial(held, WORKER + "Session", HELLO, MANY),
}
HALF_OPEN: Mapping[str, Strike] = {"20,000 half-open streams": partial(half_open, GENERATE, 20_000)}
OVER_HTTP: Mapping[str, Strike] = {name: of_model(FAST_MODEL) for name, of_model in HOLDING_HTTP.items()}
HOLDING: Mapping[str, Strike] = {**HOLDING_A_ROUTER, **HOLDING_A_WORKER, **HALF_OPEN, **OVER_HTTP}

OF_1_TO_5: Mapping[str, Strike] = {
    **{name: partial(call_again_and_again, call) for name, call in LARGE_CALLS.items()},
    "rapid reset": partial(rapid_reset, GENERATE),
    **HALF_OPEN,
}


def all_at_once(port: int, seconds: float, outcomes: Counter[str]) -> None:
    """All of OF_1_TO_5, from one tenant and one process."""
    side_by_side([partial(one, port, seconds, outcomes) for one in OF_1_TO_5.values()])


ATTACKS: Mapping[str, Strike] = {
    **OF_1_TO_5,
    ALL_OF_1_TO_5: all_at_once,
    **HOLDING,
    **{name: partial(call_again_and_again, call) for name, call in CALLS.items() if name not in LARGE_CALLS},
    "ping flood": ping_flood,
    "SETTINGS flood": settings_flood,
    "CONTINUATION flood": partial(continuation_flood, GENERATE),
    "cancelled requests": partial(cancelled, GENERATE, SHORT),
    "deadlines of 1 ns and of 11,000 years": partial(strange_deadlines, GENERATE, SHORT),
    **{name: partial(flood, kind) for name, kind in FLOODS.items()},
    **HTTP_FLOODS,
    **GUIDED_FLOODS,
    **{name: partial(open_again_and_again, session) for name, session in SESSIONS.items()},
    "rapid reset of a worker": partial(rapid_reset, WORKER + "GetModel"),
}


async def written(attack: Awaitable[None]) -> None:
    await attack


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=(*ATTACKS, *REDIS_ATTACKS))
    parser.add_argument("address", help="host:port, or a Redis's URL")
    parser.add_argument("--seconds", type=float, default=8.0)
    arguments = parser.parse_args()
    outcomes: Counter[str] = Counter()

    def end(*_: object) -> NoReturn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print(json.dumps(dict(outcomes)), flush=True)
        os._exit(0)  # calls are in flight, and their threads would wait for the answers

    calls = LARGE_CALLS if arguments.name == ALL_OF_1_TO_5 else CALLS
    for name, call in calls.items():
        if arguments.name in (name, ALL_OF_1_TO_5):
            message_of(call)
    give_way()
    signal.signal(signal.SIGTERM, end)
    print(BEGINS, file=sys.stderr, flush=True)
    if arguments.name in REDIS_ATTACKS:
        asyncio.run(written(REDIS_ATTACKS[arguments.name](arguments.address, arguments.seconds)))
    else:
        port = int(arguments.address.rpartition(":")[2])
        ATTACKS[arguments.name](port, arguments.seconds, outcomes)
    end()


if __name__ == "__main__":
    main()

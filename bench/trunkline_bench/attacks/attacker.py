"""One attack, as a process of its own: what it costs its author must not count as the victim's latency.

usage: python -m trunkline_bench.attacks.attacker NAME ADDRESS [--seconds 8]

Says on standard error when it begins. Prints how often it struck and with what statuses, as JSON.
"""

import argparse
import asyncio
import json
import sys
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from functools import partial

from trunkline.v1.generation_pb2 import SamplingParams
from trunkline.v1.inference_pb2 import GenerateRequest, TokenIds
from trunkline_bench.attacks.calls import CALLS, LARGE_CALLS, ROUTER, WORKER, call_again_and_again, side_by_side
from trunkline_bench.attacks.connections import (
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
from trunkline_bench.attacks.floods import FLOODS, flood
from trunkline_bench.attacks.redis_entries import ATTACKS as REDIS_ATTACKS
from trunkline_bench.attacks.sessions import HELLO, SESSIONS, open_again_and_again
from trunkline_bench.attacks.wire import nested
from trunkline_bench.faults.poison.sitecustomize import POISON

Strike = Callable[[int, float], Counter[str]]  # (port, seconds) → what it came to

HEALTH_WATCH = "/grpc.health.v1.Health/Watch"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
LIST_SERVICES = nested(7, b"")  # ServerReflectionRequest
BEGINS = "begins"
MANY, UNREAD = 10_000, 200
FAST_MODEL = "fast"  # of a false worker that answers as fast as a router takes it
SHARED_NAME = "a-name-that-two-requests-have"
SHORT = GenerateRequest(text="Once", sampling=SamplingParams(max_tokens=1)).SerializeToString()
POISONED = GenerateRequest(
    token_ids=TokenIds(ids=[*POISON, 5, 6, 7]), request_id=SHARED_NAME, sampling=SamplingParams(max_tokens=20)
).SerializeToString()
ENDLESS = GenerateRequest(
    model=FAST_MODEL, text="x", n=16, sampling=SamplingParams(max_tokens=900, logprobs=20, ignore_eos=True)
).SerializeToString()

STREAMS_OF_1_TO_5: Mapping[str, Strike] = {
    "rapid reset": lambda port, seconds: rapid_reset(port, ROUTER + "Generate", seconds),
    "20,000 half-open streams": lambda port, seconds: half_open(port, ROUTER + "Generate", 20_000, seconds),
}
OF_1_TO_5: Mapping[str, Strike] = {
    **{name: partial(call_again_and_again, call) for name, call in LARGE_CALLS.items()},
    **STREAMS_OF_1_TO_5,
}
ALL_OF_1_TO_5 = "all of these at once"
UNREAD_STREAMS = "200 unread streams"


def all_at_once(port: int, seconds: float) -> Counter[str]:
    """Every attack of points 1 to 5, from one tenant and one process."""
    outcomes: Counter[str] = Counter()
    adding = threading.Lock()

    def strike(one: Strike) -> None:
        came = one(port, seconds)
        with adding:
            outcomes.update(came)

    side_by_side([partial(strike, one) for one in OF_1_TO_5.values()])
    return outcomes


ATTACKS: Mapping[str, Strike] = {
    **OF_1_TO_5,
    ALL_OF_1_TO_5: all_at_once,
    **{name: partial(call_again_and_again, call) for name, call in CALLS.items() if name not in LARGE_CALLS},
    "10,000 health watches": lambda port, seconds: held(port, HEALTH_WATCH, b"", MANY, seconds, ends=True),
    "10,000 reflection streams": lambda port, seconds: held(port, REFLECTION, LIST_SERVICES, MANY, seconds),
    "ping flood": ping_flood,
    "SETTINGS flood": settings_flood,
    "CONTINUATION flood": lambda port, seconds: continuation_flood(port, ROUTER + "Generate", seconds),
    "29,000 cancelled requests": lambda port, seconds: cancelled(port, ROUTER + "Generate", SHORT, seconds),
    UNREAD_STREAMS: lambda port, seconds: held(port, ROUTER + "Generate", ENDLESS, UNREAD, seconds, ends=True),
    "5,000 idle connections": lambda port, seconds: idle_connections(port, IDLE_CONNECTIONS, seconds),
    "deadlines of 1 ns and of 11,000 years": lambda port, seconds: strange_deadlines(
        port, ROUTER + "Generate", SHORT, seconds
    ),
    **{name: partial(flood, kind) for name, kind in FLOODS.items()},
    **{name: partial(open_again_and_again, session) for name, session in SESSIONS.items()},
    "10,000 unread tokenizers": lambda port, seconds: held(
        port, WORKER + "GetTokenizer", b"", MANY, seconds, ends=True
    ),
    "10,000 unread cache watches": lambda port, seconds: held(
        port, WORKER + "WatchCache", b"", MANY, seconds, ends=True
    ),
    "10,000 idle sessions": lambda port, seconds: held(port, WORKER + "Session", HELLO, MANY, seconds),
    "rapid reset of a worker": lambda port, seconds: rapid_reset(port, WORKER + "GetModel", seconds),
    "a deadly request under another's name": lambda port, seconds: held(
        port, ROUTER + "Generate", POISONED, 1, seconds, ends=True
    ),
}


async def written(attack: Awaitable[None]) -> None:
    await attack


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=(*ATTACKS, *REDIS_ATTACKS))
    parser.add_argument("address", help="host:port, or a Redis's URL")
    parser.add_argument("--seconds", type=float, default=8.0)
    arguments = parser.parse_args()
    print(BEGINS, file=sys.stderr, flush=True)
    if arguments.name in REDIS_ATTACKS:
        asyncio.run(written(REDIS_ATTACKS[arguments.name](arguments.address, arguments.seconds)))
        print(json.dumps({}))
        return
    port = int(arguments.address.rpartition(":")[2])
    print(json.dumps(ATTACKS[arguments.name](port, arguments.seconds)))


if __name__ == "__main__":
    main()

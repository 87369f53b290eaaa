"""Floods of legal requests from a noisy tenant."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

import grpc

from trunkline.names import TENANT_KEY
from trunkline.v1.generation_pb2 import Lane, SamplingParams
from trunkline.v1.inference_pb2 import ChatMessage, ChatMessages, GenerateRequest, TokenIds
from trunkline_bench.attacks.vectors.calls import COOL_S, MIB, ROUTER, TENANT, UNLIMITED

CONNECTIONS = 4
UNANSWERED = "unanswered"  # outcome of requests in flight at the end
TOKENS = range(10, 1990)  # ordinary tokens of the demo model

_SENTENCE = "The little dog ran to the park. "
_LARGE_CHAT = GenerateRequest(
    chat=ChatMessages(messages=[ChatMessage(role="user", content=_SENTENCE * (MIB // len(_SENTENCE)))])
).SerializeToString()


@dataclass(frozen=True, slots=True)
class Flood:
    """`message` draws a request; `at_once` requests are always in flight."""

    message: Callable[[Random], bytes]
    at_once: int


def _ids(draw: Random, count: int) -> TokenIds:
    return TokenIds(ids=draw.choices(TOKENS, k=count))


def _long_prompt(draw: Random) -> bytes:
    sampling = SamplingParams(max_tokens=16, ignore_eos=True)
    return GenerateRequest(token_ids=_ids(draw, 1000), sampling=sampling).SerializeToString()


def _many_choices(draw: Random) -> bytes:
    sampling = SamplingParams(max_tokens=900, ignore_eos=True)
    return GenerateRequest(token_ids=_ids(draw, 16), n=16, sampling=sampling).SerializeToString()


def _urgent(draw: Random) -> bytes:
    sampling = SamplingParams(max_tokens=64, ignore_eos=True)
    return GenerateRequest(token_ids=_ids(draw, 32), lane=Lane.LANE_INTERACTIVE, sampling=sampling).SerializeToString()


def _large_chat(draw: Random) -> bytes:
    return _LARGE_CHAT  # built once, so that building it does not slow the attacker


FLOODS: Mapping[str, Flood] = {
    "128 prompts of 1,000 tokens at once": Flood(_long_prompt, 128),
    "64 requests of 16 choices of 900 tokens": Flood(_many_choices, 64),
    "600 interactive requests at once": Flood(_urgent, 600),
    "600 chats of 1 MiB at once": Flood(_large_chat, 600),
}


def flood(kind: Flood, port: int, duration_s: float, outcomes: Counter[str]) -> None:
    """Sends requests for `duration_s`, and counts the statuses. Cancels the requests that are then in flight."""
    asyncio.run(_flood(kind, port, duration_s, outcomes))


async def _flood(kind: Flood, port: int, duration_s: float, outcomes: Counter[str]) -> None:
    end_s, draw = time.monotonic() + duration_s, Random(0)
    options = (*UNLIMITED, ("grpc.use_local_subchannel_pool", 1))
    channels = [grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) for _ in range(CONNECTIONS)]

    async def one_after_another(channel: grpc.aio.Channel) -> None:
        method: Any = channel.unary_stream(ROUTER + "Generate")
        while time.monotonic() < end_s:
            outcomes[UNANSWERED] += 1
            try:
                async for _ in method(kind.message(draw), metadata=((TENANT_KEY, TENANT),)):
                    pass
                outcomes["OK"] += 1
            except grpc.aio.AioRpcError as error:
                outcomes[error.code().name] += 1
                await asyncio.sleep(COOL_S)
            outcomes[UNANSWERED] -= 1

    tasks = [asyncio.create_task(one_after_another(channels[one % CONNECTIONS])) for one in range(kind.at_once)]
    _, running = await asyncio.wait(tasks, timeout=duration_s)
    for task in running:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for channel in channels:
        await channel.close(None)

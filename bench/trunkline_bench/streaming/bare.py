"""The router's HTTP server with an application that does nothing: the least that an answer over HTTP costs here.

usage: python -m trunkline_bench.streaming.bare [--steps-per-s 20]     (prints its port)

The answers have the bytes of the router's, made without checks, a worker or protobuf: one event per token.
"""

import argparse
import asyncio
import contextlib
import json
from typing import Any

import uvloop

from trunkline_bench.streaming.source import Pace, stamp
from trunkline_router.edge.http.server import HttpServer
from trunkline_router.edge.http.sse import DONE, HEADERS

ID = "cmpl-0123456789abcdef0123456789abcdef"
NAMED = [(b"x-request-id", ID[5:].encode()), (b"request-id", ID[5:].encode()), (b"x-trunkline-worker", b"source")]
CACHED = (b"x-trunkline-cached-tokens", b"0")


def answer(kind: str, choices: list[dict[str, object]], usage: dict[str, int] | None) -> str:
    """One of an answer's objects."""
    made = {"id": ID, "object": kind, "created": 1_800_000_000, "model": "source", "choices": choices, "usage": usage}
    return json.dumps(made, separators=(",", ":"))


def choice(text: str, finish_reason: str | None) -> dict[str, object]:
    return {"index": 0, "text": text, "logprobs": None, "finish_reason": finish_reason}


class Bare:
    """The application."""

    def __init__(self, steps_per_s: float) -> None:
        self._steps_per_s = steps_per_s
        self._head, self._tail = answer("text_completion", [choice("*", None)], None).split("*")

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        request = json.loads(body)
        max_tokens: int = request["max_tokens"]
        usage = {"prompt_tokens": 32, "completion_tokens": max_tokens, "total_tokens": 32 + max_tokens}
        if request.get("stream"):
            await self._stream(send, max_tokens, usage)
            return
        whole = answer("text_completion", [choice(stamp(0.0) * max_tokens, "length")], usage).encode()
        own = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(whole)), *NAMED, CACHED]
        await send({"type": "http.response.start", "status": 200, "headers": own})
        await send({"type": "http.response.body", "body": whole})

    async def _stream(self, send: Any, max_tokens: int, usage: dict[str, int]) -> None:
        pace = Pace(self._steps_per_s)
        await send({"type": "http.response.start", "status": 200, "headers": [*HEADERS, *NAMED, CACHED]})
        for _ in range(max_tokens):
            event = f"data: {self._head}{stamp(await pace.next_step())}{self._tail}\n\n".encode()
            await send({"type": "http.response.body", "body": event, "more_body": True})
            if not self._steps_per_s:
                await asyncio.sleep(0)  # as between the rounds of a router's streams
        last = f"data: {answer('text_completion', [], usage)}\n\n".encode() + DONE
        await send({"type": "http.response.body", "body": last})


async def serve(steps_per_s: float) -> None:
    server = HttpServer(Bare(steps_per_s), "127.0.0.1", 0)
    await server.start()
    print(server.port, flush=True)
    await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps-per-s", type=float, default=0.0)
    with contextlib.suppress(KeyboardInterrupt):
        uvloop.run(serve(parser.parse_args().steps_per_s))


if __name__ == "__main__":
    main()

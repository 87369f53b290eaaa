"""Concurrent streams over HTTP, of every endpoint that streams, as records that can be compared."""

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from trunkline_bench.faults.streams import Record
from trunkline_bench.servers.demo_model import DEMO_MODEL

TIMEOUT_S = 120.0
MAX_LINE_BYTES = 1 << 20
WORDS = ("dog", "bird", "forest", "ball", "park", "girl", "boat", "rain", "tree", "cake")

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class HttpOrder:
    """The request of one stream."""

    path: str
    body: Json


def http_orders(count: int, *, tokens: tuple[int, int], seed: int = 7) -> list[HttpOrder]:
    """Requests to the four endpoints in turn, greedy and sampled; some with log-probabilities or several choices."""
    draw = random.Random(seed)
    return [_order(draw, number, draw.randint(*tokens)) for number in range(count)]


def _order(draw: random.Random, number: int, tokens: int) -> HttpOrder:
    text = "Once upon a time " + " ".join(draw.choices(WORDS, k=draw.randint(3, 20)))
    common = {
        "model": DEMO_MODEL.name,
        "temperature": 0.9 if number % 2 else 0.0,
        "seed": number,
        "ignore_eos": True,
        "stream": True,
    }
    chat = {"messages": [{"role": "user", "content": text}]}
    told = {"stream_options": {"include_usage": True}}
    kind = number // 2 % 4  # each endpoint has greedy and sampled ones
    if kind == 0:
        more = {"logprobs": 2} if number % 3 == 0 else {"n": 2, "temperature": 0.8} if number % 3 == 1 else {}
        return HttpOrder("/v1/completions", {**common, "prompt": text, "max_tokens": tokens, **told, **more})
    if kind == 1:
        more = {"logprobs": True, "top_logprobs": 1} if number % 3 == 0 else {}
        return HttpOrder("/v1/chat/completions", {**common, **chat, "max_tokens": tokens, **told, **more})
    if kind == 2:
        return HttpOrder("/v1/messages", {**common, **chat, "max_tokens": tokens})
    return HttpOrder("/v1/responses", {**common, "input": text, "max_output_tokens": tokens})


class HttpStreams:
    """Runs requests concurrently. `on_text` is called with the number of characters so far in all streams.

    unfinished: the streams that run now"""

    def __init__(self, port: int, on_text: Callable[[int], None] = lambda total: None) -> None:
        self._port = port
        self._on_text = on_text
        self._total = 0
        self.unfinished: list[Record] = []

    async def run(self, wanted: Sequence[HttpOrder]) -> list[Record]:
        """Returns one record per order, in their order."""
        return list(await asyncio.gather(*map(self._stream, wanted)))

    async def _stream(self, order: HttpOrder) -> Record:
        record = Record(started_s=time.monotonic())
        self.unfinished.append(record)
        try:
            async with asyncio.timeout(TIMEOUT_S), _answer(self._port, order) as (status, headers, lines):
                record.worker_id = headers.get("x-trunkline-worker", "")
                if status != 200:
                    record.error = f"HTTP {status}"
                    return record
                ended = False
                async for line in lines:
                    record.arrivals_s.append(time.monotonic())
                    ended |= self._take(record, line)
                if not (ended or record.error):
                    record.error = "cut"
        except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
            record.error = type(error).__name__
        finally:
            self.unfinished = [one for one in self.unfinished if one is not record]
        return record

    def _take(self, record: Record, data: str) -> bool:
        """Takes an event. Returns whether it ends its stream."""
        if data == "[DONE]":
            return True
        event: Json = json.loads(data)
        kind = event.get("type", "")
        if event.get("error"):
            record.error = json.dumps(event["error"])
        for choice in event.get("choices", ()):  # OpenAI's completions
            index = choice["index"]
            self._add(record, index, choice.get("text") or choice.get("delta", {}).get("content") or "")
            if choice.get("logprobs"):
                record.json_logprobs.setdefault(index, []).extend(_by_token(choice["logprobs"]))
            if choice.get("finish_reason"):
                record.finish[index] = choice["finish_reason"]
        if event.get("usage") and "choices" in event:
            record.usage = event["usage"]["prompt_tokens"], event["usage"]["completion_tokens"]
        elif kind == "content_block_delta":
            self._add(record, 0, event["delta"]["text"])
        elif kind == "message_delta":
            record.finish[0] = event["delta"]["stop_reason"]
            record.usage = 0, event["usage"]["output_tokens"]
        elif kind == "response.output_text.delta":
            self._add(record, 0, event["delta"])
        elif kind == "response.failed":
            record.error = json.dumps(event["response"]["error"])
        elif kind in ("response.completed", "response.incomplete"):
            record.finish[0] = kind
            used = event["response"]["usage"]
            record.usage = used["input_tokens"], used["output_tokens"]
        return kind in ("message_stop", "response.completed", "response.incomplete")

    def _add(self, record: Record, index: int, text: str) -> None:
        record.text[index] = record.text.get(index, "") + text
        self._total += len(text)
        self._on_text(self._total)


def _by_token(logprobs: Json) -> list[str]:
    """The log-probabilities of an event, by token: how many tokens an event has depends on when the client reads."""
    if "content" in logprobs:
        return [json.dumps(entry) for entry in logprobs["content"]]
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    return [json.dumps(row) for row in zip(*(logprobs[name] for name in names), strict=True)]


@asynccontextmanager
async def _answer(port: int, order: HttpOrder) -> AsyncIterator[tuple[int, dict[str, str], AsyncIterator[str]]]:
    """Status, headers, and the data of the events as they come."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=MAX_LINE_BYTES)
    try:
        body = json.dumps(order.body).encode()
        head = f"POST {order.path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().strip().split("\r\n")
        headers = dict(line.split(": ", 1) for line in lines)
        yield int(first.split()[1]), headers, _events(reader)
    finally:
        writer.close()


async def _events(reader: asyncio.StreamReader) -> AsyncIterator[str]:
    unfinished = b""
    while size := int(await reader.readuntil(b"\r\n"), 16):
        unfinished += await reader.readexactly(size)
        await reader.readexactly(2)
        *whole, unfinished = unfinished.split(b"\n\n")
        for event in whole:
            for line in event.split(b"\n"):
                if line.startswith(b"data: "):
                    yield line[6:].decode()

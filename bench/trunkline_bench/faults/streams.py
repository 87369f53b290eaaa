"""Concurrent streams of every kind, with records that can be compared bit by bit."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from trunkline.client.client import Client
from trunkline.errors import TrunklineError

VOCABULARY = 2000  # of the demo model, without special tokens


@dataclass(frozen=True, slots=True)
class Order:
    """The request of one stream. `options` are keyword arguments of `Client.generate`."""

    prompt: list[int]
    options: dict[str, Any]

    @property
    def is_greedy(self) -> bool:
        return not self.options.get("temperature")


@dataclass(slots=True)
class Record:
    """The answer of one stream, by choice. Times are not compared."""

    token_ids: dict[int, list[int]] = field(default_factory=dict)
    text: dict[int, str] = field(default_factory=dict)
    prompt_logprobs: list[float] = field(default_factory=list)
    usage: tuple[int, int] = (0, 0)  # prompt and output tokens
    logprobs: dict[int, list[tuple[int, float]]] = field(default_factory=dict)
    tops: dict[int, list[list[tuple[int, float]]]] = field(default_factory=dict)  # the top log-probabilities
    json_logprobs: dict[int, list[str]] = field(default_factory=dict)  # over HTTP, by token
    finish: dict[int, str] = field(default_factory=dict)
    seams: list[str] = field(default_factory=list)  # chunks whose offset does not continue the previous one
    error: str = ""
    asked_again: str = ""  # the error after which the client retried
    resumptions: int = 0
    started_s: float = 0.0
    arrivals_s: list[float] = field(default_factory=list)
    worker_id: str = ""

    def outcome(self) -> tuple[Any, ...]:
        """The parts that must not depend on accidents."""
        return (
            self.token_ids,
            self.text,
            self.logprobs,
            self.tops,
            self.json_logprobs,
            self.finish,
            self.prompt_logprobs,
            self.usage,
            self.error,
        )

    @property
    def ttft_s(self) -> float:
        return self.arrivals_s[0] - self.started_s

    def longest_gap_s(self, since_s: float) -> float:
        """The longest time between two messages of which the second came after `since_s`."""
        pairs = zip(self.arrivals_s, self.arrivals_s[1:], strict=False)
        return max((after - before for before, after in pairs if after > since_s), default=0.0)


def orders(count: int, *, tokens: tuple[int, int], seed: int = 7) -> list[Order]:
    """Requests, greedy and sampled in turn; some with stop strings, log-probabilities, penalties, several choices."""
    draw = random.Random(seed)
    made = []
    for number in range(count):
        prompt = [draw.randrange(3, VOCABULARY) for _ in range(draw.randint(5, 60))]
        options: dict[str, Any] = {"max_tokens": draw.randint(*tokens), "ignore_eos": True, "seed": number}
        options["temperature"] = 0.0 if number % 2 else 0.9
        if number % 2 == 0 and number % 4:
            options |= {"top_p": 0.9, "top_k": 50}
        if number % 5 == 0:
            options["logprobs"] = 2
        if number % 7 == 0:
            options |= {"presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.1}
        if number % 6 == 0:
            options["stop"] = [" forest", " and the little bird"]
        if number % 9 == 0:
            options |= {"n": 2, "temperature": 0.8}
        if number % 8 == 3:
            options |= {"ignore_eos": False, "min_tokens": 20, "stop_token_ids": [17], "include_stop": True}
        if number % 11 == 0:
            options["prompt_logprobs"] = 0
        made.append(Order(prompt, options))
    return made


def busiest_worker(unfinished: Iterable[Record]) -> str:
    """Id of the worker with the most of these streams, of which at least one has begun."""
    ((worker_id, _),) = Counter(record.worker_id for record in unfinished if record.worker_id).most_common(1)
    return worker_id


class Streams:
    """Runs requests concurrently. `on_token` is called with the number of tokens so far in all streams.

    unfinished: the streams that run now"""

    def __init__(self, on_token: Callable[[int], None] = lambda total: None) -> None:
        self._on_token = on_token
        self.total_tokens = 0
        self.unfinished: list[Record] = []

    async def run(self, clients: Sequence[Client], wanted: Sequence[Order], *, retries: int = 0) -> list[Record]:
        """Spreads the orders over the clients. `retries`: how often a failed stream is retried at the next client.

        Returns one record per order, in their order."""

        async def one(number: int, order: Order) -> Record:
            record = await self._stream(clients[number % len(clients)], order)
            for again in range(1, retries + 1):
                if not record.error:
                    break
                first, record = record, await self._stream(clients[(number + again) % len(clients)], order)
                record.asked_again = first.error
            return record

        return list(await asyncio.gather(*(one(number, order) for number, order in enumerate(wanted))))

    async def _stream(self, client: Client, order: Order) -> Record:
        record = Record(started_s=time.monotonic())
        self.unfinished.append(record)
        text_bytes: dict[int, int] = {}
        try:
            async for piece in client.generate(order.prompt, timeout_s=120.0, **order.options):
                record.arrivals_s.append(time.monotonic())
                chunk = next(chunk for chunk in piece.response.chunks if chunk.index == piece.index)
                tokens = record.token_ids.setdefault(piece.index, [])
                if chunk.first_token_index != len(tokens) or chunk.text_offset != text_bytes.get(piece.index, 0):
                    record.seams.append(f"choice {piece.index}: token {chunk.first_token_index} after {len(tokens)}")
                tokens += piece.token_ids
                record.text[piece.index] = record.text.get(piece.index, "") + chunk.text
                text_bytes[piece.index] = text_bytes.get(piece.index, 0) + len(chunk.text.encode())
                record.logprobs.setdefault(piece.index, []).extend(
                    (entry.chosen.token_id, entry.chosen.logprob) for entry in piece.logprobs
                )
                record.tops.setdefault(piece.index, []).extend(
                    [(top.token_id, top.logprob) for top in entry.top] for entry in piece.logprobs
                )
                if piece.finish_reason:
                    record.finish[piece.index] = piece.finish_reason
                if piece.response.HasField("prompt"):
                    record.worker_id = piece.response.prompt.worker_id
                    record.prompt_logprobs = [entry.chosen.logprob for entry in piece.response.prompt.logprobs]
                if piece.response.HasField("usage"):
                    usage = piece.response.usage
                    record.resumptions = usage.resumptions
                    record.usage = usage.prompt_tokens, usage.completion_tokens
                self.total_tokens += len(piece.token_ids)
                self._on_token(self.total_tokens)
        except TrunklineError as error:
            record.error = type(error).__name__
        self.unfinished = [one for one in self.unfinished if one is not record]
        return record

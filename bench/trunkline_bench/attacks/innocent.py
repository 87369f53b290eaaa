"""The innocent tenant: it sends short requests all the time and takes no part in the attack."""

import asyncio
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from trunkline.client.client import Client, Prompt
from trunkline.errors import TrunklineError
from trunkline_bench.attacks.window import Window
from trunkline_bench.reports.statistics import percentile

TENANT = "innocent"
PACE_S = 0.01  # between two requests
REQUEST_TIMEOUT_S = 60.0
WARM = 10  # requests before anything is measured
SEVERAL_TOKENS, NEW_SCHEMAS = "16 tokens", "new schemas"  # kinds of which answers have more than one token
SEVERAL = 16


@dataclass(slots=True)
class Record:
    """Outcomes of the innocent's requests, in ms."""

    times_ms: list[float] = field(default_factory=list)  # from sending to the first token, or to an error
    later_ms: list[float] = field(default_factory=list)  # for each later token of an answer, a mean
    errors: list[str] = field(default_factory=list)  # one line per failed request

    @property
    def p50_ms(self) -> float:
        return percentile(self.times_ms, 0.5)

    @property
    def p99_ms(self) -> float:
        return percentile(self.times_ms, 0.99)

    @property
    def later_p99_ms(self) -> float:
        return percentile(self.later_ms, 0.99)


class Innocent:
    """Sends requests of one kind, one after another. `request_id`: id of every request; may be empty."""

    def __init__(self, client: Client, kind: str, *, model: str, request_id: str = "") -> None:
        self.model = model
        self._client, self._kind, self._request_id = client, kind, request_id
        self._numbers = count()
        self._prompt_tokens = 0  # per request so far; equal texts must always have equally many

    async def warm_up(self) -> float:
        """Warms connections and caches. Returns the time of the slowest of the later requests, in ms.

        Raises TrunklineError."""
        times_ms = []
        for _ in range(WARM):
            times_ms.append((await self._ask())[0])
        return max(times_ms[WARM // 2 :])

    async def ask_for(self, window: Window, record: Record) -> None:
        """Sends requests until the window is over, and adds them to the record."""
        began_s = time.monotonic()
        await self.ask_while(lambda: not window.is_over(time.monotonic() - began_s, len(record.times_ms)), record)

    async def ask_while(self, goes_on: Callable[[], bool], record: Record) -> None:
        """Sends requests while `goes_on()`, at least one, and adds them to the record. The last one is not cut off."""
        while goes_on() or not record.times_ms:
            started_s = time.monotonic()
            try:
                first_ms, later_ms = await self._ask()
            except (TrunklineError, AssertionError) as error:
                record.errors.append(f"{type(error).__name__}: {error}")
                first_ms, later_ms = (time.monotonic() - started_s) * 1e3, None
            record.times_ms.append(first_ms)
            if later_ms is not None:
                record.later_ms.append(later_ms)
            await asyncio.sleep(PACE_S)

    async def _ask(self) -> tuple[float, float | None]:
        """Returns the times to the first token and per later token in ms; None if there is no later one.

        Raises TrunklineError, and AssertionError if the number of prompt tokens has changed."""
        started_s, first_s, num_tokens, tokens = time.monotonic(), 0.0, 0, 0
        async for piece in self._client.generate(
            self._prompt(),
            model=self.model,
            max_tokens=SEVERAL if self._kind in (SEVERAL_TOKENS, NEW_SCHEMAS) else 1,
            request_id=self._request_id,
            timeout_s=REQUEST_TIMEOUT_S,
            grammar=_new_schema() if self._kind == NEW_SCHEMAS else None,
        ):
            first_s = first_s or time.monotonic()
            num_tokens += len(piece.token_ids)
            tokens = piece.response.usage.prompt_tokens
        ended_s = time.monotonic()
        assert tokens == self._prompt_tokens or not self._prompt_tokens, (
            f"{tokens} prompt tokens, not {self._prompt_tokens}"
        )
        self._prompt_tokens = tokens
        later_ms = (ended_s - first_s) / (num_tokens - 1) * 1e3 if num_tokens > 1 else None
        return (first_s - started_s) * 1e3, later_ms

    def _prompt(self) -> Prompt:
        number = next(self._numbers) % 100
        if self._kind == "token ids":
            return [10 + number, 20, 30]
        return [("user", "Tell me a story.")] if self._kind == "chat" else "Once upon a time"


def _new_schema() -> dict[str, Any]:
    """A small schema, as no worker has compiled one before."""
    name = secrets.token_hex(4)
    return {"json_schema": {"type": "object", "properties": {name: {"type": "string"}}, "required": [name]}}

"""Answers to scrapers, made at most once a second however many of them ask."""

import asyncio
import time
from collections.abc import Awaitable, Callable

from trunkline_runtime.telemetry.exposition import Families, content_type_of, exposition

FRESH_S = 1.0  # an answer is given again for this long

Collect = Callable[[], Awaitable[Families]]


class FreshAnswers:
    """collect: returns the metrics of now"""

    def __init__(self, collect: Collect, now_s: Callable[[], float] = time.monotonic) -> None:
        self._collect = collect
        self._now_s = now_s
        self._making = asyncio.Lock()
        self._answers: dict[str, tuple[float, bytes]] = {}  # by content type: when, and body

    async def answer(self, accept: str) -> tuple[bytes, str]:
        """(body, content type) of now, or of less than FRESH_S ago, in the format that an Accept header asks for."""
        content_type = content_type_of(accept)
        async with self._making:
            made = self._answers.get(content_type)
            if made is None or self._now_s() - made[0] >= FRESH_S:
                body = await exposition(await self._collect(), content_type)
                made = self._answers[content_type] = (self._now_s(), body)
            return made[1], content_type

"""Metrics as text, in pieces, so that a long answer delays no stream; made at most once a second however many ask."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from functools import partial

from prometheus_client.core import Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics

Families = Iterable[Metric]
OPENMETRICS_END = b"# EOF\n"
FRESH_S = 1.0  # an answer is given again for this long

Collect = Callable[[], Awaitable[Families]]


def content_type_of(accept: str) -> str:
    """The format for an Accept header: OpenMetrics, which has examples, if the header names it, and otherwise
    Prometheus's text format. Nothing else that clients write into the header matters."""
    return openmetrics.CONTENT_TYPE_LATEST if "application/openmetrics-text" in accept else CONTENT_TYPE_PLAIN_0_0_4


async def exposition(families: Families, content_type: str) -> bytes:
    """The metrics in this format. Other tasks run after each family."""
    is_openmetrics = content_type == openmetrics.CONTENT_TYPE_LATEST
    encode: Callable[[_Alone], bytes] = _openmetrics if is_openmetrics else generate_latest
    pieces = []
    for family in families:
        pieces.append(encode(_Alone(family)).removesuffix(OPENMETRICS_END))
        await asyncio.sleep(0)
    if is_openmetrics:
        pieces.append(OPENMETRICS_END)
    return b"".join(pieces)


# By default the library (0.26) replaces the colons of vLLM's names in samples of this format, though they are allowed.
_openmetrics = partial(openmetrics.generate_latest, escaping=openmetrics.ALLOWUTF8)


class _Alone:
    """A registry of one family."""

    def __init__(self, family: Metric) -> None:
        self.collect: Callable[[], list[Metric]] = lambda: [family]


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

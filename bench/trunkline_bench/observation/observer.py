"""Observes a router while it works, as in production: metrics are scraped as often as
deploy/observability/prometheus.yaml says, and one page is open. Between two loads neither happens, so that the time in
which another router works does not count.
"""

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

SCRAPE_INTERVAL_S = 15.0
FIRST_SCRAPE_S = SCRAPE_INTERVAL_S / 2  # so that loads of 15 n seconds are scraped n times
FIRST_VIEW_S = 10.0
OPENMETRICS = "application/openmetrics-text; version=1.0.0"
MOST_LINE_BYTES = 1 << 22  # of an event

_SAMPLE = re.compile(r"^(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>[^}]*)\})? (?P<value>\S+)", re.MULTILINE)


@dataclass(slots=True)
class Observations:
    """What was seen of a router.

    scrape: the latest answer to a scraper
    """

    scrapes: int = 0
    views: int = 0
    scrape: str = ""

    def sample(self, name: str, labels: str = "") -> float:
        """A value of the latest scrape; 0 if there is none. labels: as they are written there, in
        order of their names: 'outcome="exported"'"""
        for found in _SAMPLE.finditer(self.scrape):
            if found["name"] == name and (found["labels"] or "") == labels:
                return float(found["value"])
        return 0.0


class Observer:
    """Observes the router with this HTTP address ("host:port"), inside observed()."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._has_view = asyncio.Event()
        self._next_scrape_s = FIRST_SCRAPE_S  # in seconds of observed time
        self.seen = Observations()

    @contextlib.asynccontextmanager
    async def observed(self) -> AsyncIterator[None]:
        """Looks at the page, and scrapes. Raises as watched() does."""
        async with self.watched(), self.scraped():
            yield

    @contextlib.asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Keeps a page's stream of events open. Raises OSError or TimeoutError if the router does not serve it."""
        self._has_view.clear()
        async with self._asked("/fleet/events", "text/event-stream") as reader:
            watching = asyncio.create_task(self._watch(reader))
            try:
                await asyncio.wait_for(self._has_view.wait(), FIRST_VIEW_S)
                yield
            finally:
                watching.cancel()

    @contextlib.asynccontextmanager
    async def scraped(self) -> AsyncIterator[None]:
        """Scrapes the metrics every 15 seconds of all the time that is spent inside."""
        began_s = time.monotonic()

        async def scrape_on() -> None:
            while True:
                await asyncio.sleep(max(0.0, began_s + self._next_scrape_s - time.monotonic()))
                self._next_scrape_s += SCRAPE_INTERVAL_S
                await self.scrape()

        scraping = asyncio.create_task(scrape_on())
        try:
            yield
        finally:
            self._next_scrape_s -= time.monotonic() - began_s
            scraping.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await scraping

    async def scrape(self) -> None:
        """Scrapes the metrics once. Raises OSError if the router refuses."""
        async with self._asked("/metrics", OPENMETRICS) as reader:
            self.seen.scrape = (await reader.read()).decode()
        self.seen.scrapes += 1

    async def _watch(self, reader: asyncio.StreamReader) -> None:
        while data := await reader.readline():
            if data.startswith(b"event: "):
                self.seen.views += 1
                self._has_view.set()

    @contextlib.asynccontextmanager
    async def _asked(self, path: str, accept: str) -> AsyncIterator[asyncio.StreamReader]:
        """Sends a GET on a connection of its own. Yields the reader of the body. Raises OSError if the status is not
        200."""
        host, _, port = self._address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port), limit=MOST_LINE_BYTES)
        try:
            head = f"GET {path} HTTP/1.1\r\nHost: {self._address}\r\nAccept: {accept}\r\nConnection: close\r\n\r\n"
            writer.write(head.encode())
            answer = await reader.readuntil(b"\r\n\r\n")
            if not answer.startswith(b"HTTP/1.1 200"):
                raise OSError(f"{path}: {answer.splitlines()[0].decode()}")
            yield reader
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

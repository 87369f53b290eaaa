"""Endpoints that tell of the router itself: whether it lives and is ready, its version, metrics, and the page of its
API."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version

import orjson

from trunkline.status import CODE_RESOURCE_EXHAUSTED, OVERLOADED, RequestRefused
from trunkline_router.address import host_of, network_of
from trunkline_router.edge.endpoint import Handler, peer_of
from trunkline_router.edge.http_call import HttpCall
from trunkline_runtime.telemetry.exposition import FreshAnswers

MAX_SCRAPES = 32  # answers that are made or sent at a time
MAX_SCRAPES_OF_HOST = 8  # so that one host that does not read leaves room for the others
SCRAPE_AGAIN_MS = 1000


class StatusEndpoints:
    """is_ready: whether a worker accepts requests;  page: the page of the API, as JSON"""

    def __init__(self, is_ready: Callable[[], bool], page: bytes) -> None:
        self._is_ready = is_ready
        self._page = page
        self._version = orjson.dumps({"version": version("trunkline")})

    @property
    def handlers(self) -> Mapping[str, Handler]:
        """The handlers, by method and path."""
        return {
            "GET /health": self._health,
            "GET /ready": self._ready,
            "GET /version": self._tell_version,
            "GET /openapi.json": self._tell_page,
        }

    async def _health(self, call: HttpCall) -> None:
        await call.respond(b'{"status":"ok"}')

    async def _ready(self, call: HttpCall) -> None:
        if self._is_ready():
            await call.respond(b'{"status":"ready"}')
        else:
            await call.respond(b'{"status":"not ready"}', status=503)

    async def _tell_version(self, call: HttpCall) -> None:
        await call.respond(self._version)

    async def _tell_page(self, call: HttpCall) -> None:
        await call.respond(self._page)


class MetricsEndpoint:
    """answers: those for scrapers"""

    def __init__(self, answers: FreshAnswers) -> None:
        self._answers = answers
        self._scrapes: Counter[str] = Counter()  # by host

    @property
    def handlers(self) -> Mapping[str, Handler]:
        """The handler, by method and path."""
        return {"GET /metrics": self._tell_metrics}

    async def _tell_metrics(self, call: HttpCall) -> None:
        with self._scraping(call):
            accept = b",".join(value for name, value in call.scope["headers"] if name == b"accept")
            body, content_type = await self._answers.answer(accept.decode("latin-1"))
            await call.respond_in_pieces(body, content_type)

    @contextmanager
    def _scraping(self, call: HttpCall) -> Iterator[None]:
        """Counts an answer while the context is open. Raises RequestRefused (OVERLOADED) if there are too many."""
        host = network_of(host_of(peer_of(call.scope)))
        if self._scrapes.total() >= MAX_SCRAPES or self._scrapes[host] >= MAX_SCRAPES_OF_HOST:
            message = f"{self._scrapes.total()} scrapers are being answered, {self._scrapes[host]} of this host"
            raise RequestRefused(CODE_RESOURCE_EXHAUSTED, OVERLOADED, message, retry_delay_ms=SCRAPE_AGAIN_MS)
        self._scrapes[host] += 1
        try:
            yield
        finally:
            self._scrapes[host] -= 1
            if not self._scrapes[host]:
                del self._scrapes[host]

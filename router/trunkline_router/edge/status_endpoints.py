"""Endpoints that tell of the router itself: whether it lives and is ready, its version, metrics, and the page of its
API."""

from collections.abc import Callable, Mapping
from importlib.metadata import version

import orjson

from trunkline.status import CODE_RESOURCE_EXHAUSTED, OVERLOADED, RequestRefused
from trunkline_router.edge.endpoint import Handler
from trunkline_router.edge.http_call import HttpCall
from trunkline_runtime.telemetry.fresh_answers import FreshAnswers

MAX_SCRAPES = 32  # answers that are made or sent at a time
SCRAPE_AGAIN_MS = 1000


class StatusEndpoints:
    """is_ready: whether a worker accepts requests;  page: the page of the API, as JSON;  metrics: the answers for
    scrapers"""

    def __init__(self, is_ready: Callable[[], bool], page: bytes, metrics: FreshAnswers) -> None:
        self._is_ready = is_ready
        self._page = page
        self._metrics = metrics
        self._num_scrapes = 0
        self._version = orjson.dumps({"version": version("trunkline")})

    @property
    def handlers(self) -> Mapping[str, Handler]:
        """The handlers, by method and path."""
        return {
            "GET /health": self._health,
            "GET /ready": self._ready,
            "GET /version": self._tell_version,
            "GET /openapi.json": self._tell_page,
            "GET /metrics": self._tell_metrics,
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

    async def _tell_metrics(self, call: HttpCall) -> None:
        if self._num_scrapes >= MAX_SCRAPES:
            message = f"{MAX_SCRAPES} scrapers are being answered"
            raise RequestRefused(CODE_RESOURCE_EXHAUSTED, OVERLOADED, message, retry_delay_ms=SCRAPE_AGAIN_MS)
        self._num_scrapes += 1
        try:
            accept = b",".join(value for name, value in call.scope["headers"] if name == b"accept")
            body, content_type = await self._metrics.answer(accept.decode("latin-1"))
            await call.respond_in_pieces(body, content_type)
        finally:
            self._num_scrapes -= 1

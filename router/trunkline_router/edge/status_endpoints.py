"""Endpoints that tell of the router itself: whether it lives and is ready, its version, metrics, and the page of its
API."""

from collections.abc import Callable, Mapping
from importlib.metadata import version

import orjson

from trunkline_router.access.gate.places import Bounds, Places, Sender
from trunkline_router.address import host_of, network_of
from trunkline_router.edge.http_call import Handler, HttpCall
from trunkline_runtime.telemetry.exposition import FreshAnswers

# Answers that are made or sent at a time. One host that does not read leaves room for the others.
SCRAPES = Bounds(in_all=32, of_host=8, of_connection=8, of_tenant=32)


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
        self._scrapes = Places(SCRAPES, "scrapers being answered")

    @property
    def handlers(self) -> Mapping[str, Handler]:
        """The handler, by method and path."""
        return {"GET /metrics": self._tell_metrics}

    async def _tell_metrics(self, call: HttpCall) -> None:
        network = network_of(host_of(call.peer))
        place = self._scrapes.take(Sender(network, network), lambda _: None)
        try:
            accept = b",".join(value for name, value in call.scope["headers"] if name == b"accept")
            body, content_type = await self._answers.answer(accept.decode("latin-1"))
            await call.respond(body, content_type=content_type.encode())
        finally:
            self._scrapes.release(place)

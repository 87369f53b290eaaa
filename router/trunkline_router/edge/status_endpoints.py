"""Endpoints that tell of the router itself: whether it lives and is ready, its version, and the page of its API."""

from collections.abc import Callable, Mapping
from importlib.metadata import version

import orjson

from trunkline_router.edge.endpoint import Handler
from trunkline_router.edge.http_call import HttpCall


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
